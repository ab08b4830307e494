"use strict";
// The demo's page. All text of the gallery (names, classes, errors) goes through textContent, so that none of it is markup.

const $ = (id) => document.getElementById(id);
const query = { positives: [], negatives: [] };  // examples: {row} or {vector}, with a name and the address of a picture
const PAGE = 24, LISTED = 60;
let about, start = 0, searches = 0;

// ---------------------------------------------------------------- requests

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The demo does not respond. Is it still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error || `The demo answers ${answer.status}.`);
}

const post = (path, body) => ask(path, { method: "POST", body });

function show(error) {
  $("error").hidden = !error;
  $("error").firstElementChild.textContent = error ? error.message[0].toUpperCase() + error.message.slice(1) : "";
}

// Runs an action of the reader, and shows what goes wrong in it.
const guarded = (action) => async (...values) => {
  try {
    show(null);
    await action(...values);
  } catch (error) {
    show(error);
  }
};

// ---------------------------------------------------------------- images

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const classOf = (image) => image.attributes.class ?? image.attributes.label ?? "";
const spoken = (image) => [classOf(image), image.name].filter(Boolean).join(", ");
const pictureOf = (image) => `/image/${image.row}`;

function tile(image, detailed) {
  const picture = element("img", { src: pictureOf(image), alt: "", loading: "lazy" });
  picture.onerror = () => picture.replaceWith(element("span", { className: "missing", textContent: "no picture" }));
  const button = element("button", { type: "button", className: "search-by" }, picture);
  button.setAttribute("aria-label", `Search by ${spoken(image)}`);
  button.onclick = () => searchBy([image], []);
  const item = element("li", {}, button);
  item.dataset.row = image.row;
  if (classOf(image)) item.append(element("p", { className: "class", textContent: classOf(image) }));
  if (!detailed) return item;
  item.append(element("p", { className: "file", textContent: image.name, title: image.name }));
  const far = element("p", { textContent: `distance ${image.distance.toFixed(3)} ` });
  if (image.same !== null) {
    item.className = image.same ? "same" : "different";
    far.append(element("span", { className: "decision", textContent: image.same ? "✓ same" : "✗ different" }));
  }
  const both = element("div", { className: "both" });
  for (const [side, sign, words] of [["positives", "+ like", "More like"], ["negatives", "− unlike", "Not like"]]) {
    const add = element("button", { type: "button", textContent: sign });
    add.setAttribute("aria-label", `${words} ${spoken(image)}`);
    add.onclick = () => addExample(side, image);
    both.append(add);
  }
  if (about.explains && query.positives.length) {
    const why = element("button", { type: "button", textContent: "why?" });
    why.setAttribute("aria-label", `Why is ${spoken(image)} a neighbor?`);
    why.onclick = () => explain(query.positives[0], image, why);
    both.append(why);
  }
  item.append(far, both);
  return item;
}

// ---------------------------------------------------------------- search

function drawExamples() {
  for (const [side, examples] of Object.entries(query)) {
    $(side).replaceChildren(...examples.map((example) => {
      const remove = element("button", { type: "button", textContent: "×" });
      remove.setAttribute("aria-label", `Remove ${example.name}`);
      remove.onclick = () => {
        query[side] = query[side].filter((other) => other !== example);
        refresh();
        $(side).focus();
      };
      return element("li", {}, element("img", { src: example.picture, alt: example.name }), remove);
    }));
  }
}

const asExample = (image) => "picture" in image ? image : { row: image.row, name: spoken(image), picture: pictureOf(image) };

function searchBy(positives, negatives) {
  query.positives = positives.map(asExample);
  query.negatives = negatives.map(asExample);
  return refresh();
}

function addExample(side, image) {
  const other = side === "positives" ? "negatives" : "positives";
  query[other] = query[other].filter((example) => example.row !== image.row);
  if (!query[side].some((example) => example.row === image.row)) query[side].push(asExample(image));
  return refresh();
}

const filter = () => $("column").value && $("value").value ? { [$("column").value]: $("value").value } : {};

const refresh = guarded(async () => {
  drawExamples();
  const number = ++searches;
  if (!query.positives.length) {
    $("results").replaceChildren();
    $("status").textContent = query.negatives.length ? "Add an image to be like." : "None yet.";
    drawMap();
    return;
  }
  const plain = (examples) => examples.map((example) => "row" in example ? { row: example.row } : { vector: example.vector });
  const body = { positives: plain(query.positives), negatives: plain(query.negatives), k: Number($("k").value), where: filter() };
  const begun = performance.now();
  $("results").setAttribute("aria-busy", "true");
  try {
    const { neighbors } = await (await post("/api/search", JSON.stringify(body))).json();
    if (number !== searches) return;  // a later search has been begun
    $("results").replaceChildren(...neighbors.map((image) => tile(image, true)));
    const same = neighbors.filter((image) => image.same).length;
    const decided = about.calibration ? `, ${same} of them the same` : "";
    $("status").textContent = `${neighbors.length} neighbors${decided}, in ${Math.round(performance.now() - begun)} ms.`;
    map.neighbors = neighbors.map((image) => image.row);
    drawMap();
  } finally {
    $("results").removeAttribute("aria-busy");
  }
});

const upload = guarded(async (file) => {
  if (file.size > about.most_bytes) throw new Error(`${file.name} is larger than ${about.most_bytes / 2 ** 20} MB.`);
  $("status").textContent = "Searching…";
  try {
    const { vector } = await (await post("/api/embed", file)).json();
    await searchBy([{ vector, file, name: file.name || "pasted image", picture: URL.createObjectURL(file) }], []);
  } catch (error) {
    $("status").textContent = "None yet.";
    throw error;
  }
});

const explain = guarded(async (example, image, button) => {
  const asked = new URLSearchParams({ row: image.row, ..."row" in example ? { query: example.row } : {} });
  button.disabled = true;
  try {
    const picture = await (await post(`/api/why?${asked}`, example.file)).blob();
    const words = `Heat maps of what ${example.name} and ${spoken(image)} have in common`;
    $("why-picture").replaceChildren(element("img", { src: URL.createObjectURL(picture), alt: words }));
    $("why").showModal();
  } finally {
    button.disabled = false;
  }
});

const imageOf = (transfer) => [...transfer.files].find((file) => file.size) ?? null;

function listenForImages() {
  $("file").onchange = () => {
    if ($("file").files.length) upload($("file").files[0]);
    $("file").value = "";
  };
  document.onpaste = (event) => {
    const file = imageOf(event.clipboardData);
    if (file) upload(file);
  };
  document.ondragover = (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  };
  document.ondragleave = () => $("drop").classList.remove("over");
  document.ondrop = (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    const file = imageOf(event.dataTransfer);
    if (file) upload(file);
  };
}

// ---------------------------------------------------------------- gallery

const browse = guarded(async () => {
  const asked = new URLSearchParams({ ...filter(), start, count: PAGE });
  const { total, images } = await (await ask(`/api/rows?${asked}`)).json();
  $("images").replaceChildren(...images.map((image) => tile(image, false)));
  const last = start + images.length;
  $("page").textContent = images.length ? `${start + 1} to ${last} of ${total.toLocaleString("en")}` : "No image matches.";
  $("previous").disabled = start === 0;
  $("next").disabled = last >= total;
});

function turn(by) {
  start = Math.max(0, start + by * PAGE);
  browse();
}

function filtered() {
  start = 0;
  browse();
  if (query.positives.length) refresh();
  colorMap();
}

function chooseColumn() {
  const values = about.columns[$("column").value];
  $("value-label").hidden = !values;
  $("value").value = "";
  $("values").replaceChildren(...(values ?? []).map((value) => element("option", { value })));
  filtered();
}

// ---------------------------------------------------------------- map

const map = { x: null, y: null, codes: null, colors: null, scale: 1, left: 0, top: 0, neighbors: [], selected: new Set(), path: [] };
const isShown = (row) => !map.codes || map.codes[row] >= 0;
const context = () => $("canvas").getContext("2d");

// From a place in [0, 1] to a pixel of the canvas: side * scale * (place - left or top).
const side = () => Math.min($("canvas").clientWidth, $("canvas").clientHeight) * 0.96;
const margin = () => ({ x: ($("canvas").clientWidth - side()) / 2, y: ($("canvas").clientHeight - side()) / 2 });
const toX = (x) => margin().x + side() * map.scale * (x - map.left);
const toY = (y) => margin().y + side() * map.scale * (y - map.top);
const fromX = (pixel) => (pixel - margin().x) / (side() * map.scale) + map.left;
const fromY = (pixel) => (pixel - margin().y) / (side() * map.scale) + map.top;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function loadMap() {
  let answer;
  try {
    answer = await ask("/api/map");
  } catch {
    $("map-note").textContent = "There is no map of this gallery. The list below has its images.";
    return;
  }
  if (answer.status === 202) {
    $("map-note").textContent = "The map is being computed; it appears here when it is done.";
    setTimeout(loadMap, 1000);
    return;
  }
  const places = new Uint16Array(await answer.arrayBuffer());
  map.x = Float32Array.from(places.subarray(0, places.length / 2), (value) => value / 65535);
  map.y = Float32Array.from(places.subarray(places.length / 2), (value) => value / 65535);
  $("map-note").textContent = `${map.x.length.toLocaleString("en")} images. Those that the model finds similar lie close together. `
    + "Distances between groups mean nothing.";
  $("map-body").hidden = false;
  $("canvas").setAttribute("aria-label", `Map of ${map.x.length} images`);
  $("color").replaceChildren(...Object.keys(about.columns).map((name) => element("option", { value: name, textContent: name })));
  $("color").value = ["class", "label"].find((name) => name in about.columns) ?? Object.keys(about.columns)[0] ?? "";
  listenToMap();
  await colorMap();
}

// Classes differ in hue, by the golden angle, so that neighboring numbers do not look alike.
const colorMap = guarded(async () => {
  if (!map.x) return;
  const name = $("color").value;
  const answer = name && await ask(`/api/codes/${encodeURIComponent(name)}?${new URLSearchParams(filter())}`);
  map.codes = name ? new Int32Array(await answer.arrayBuffer()) : null;
  drawMap();
});

let drawing = 0;
function drawMap() {
  if (map.x && !drawing) drawing = requestAnimationFrame(paint);
}

function paint() {
  drawing = 0;
  const canvas = $("canvas"), ratio = devicePixelRatio || 1, pen = context();
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, plain = color("--dot"), faint = color("--line");
  const size = Math.max(1.5, Math.min(7, 2.2 * Math.sqrt(map.scale) * Math.sqrt(3000 / map.x.length + 0.4)));
  const { x: left, y: top } = margin(), step = side() * map.scale;
  const fills = new Map();
  const fill = (code) => {
    if (!fills.has(code)) fills.set(code, `hsl(${(code * 137.508) % 360} 65% ${dark ? 65 : 42}%)`);
    return fills.get(code);
  };
  for (let row = 0; row < map.x.length; row++) {
    const x = left + step * (map.x[row] - map.left), y = top + step * (map.y[row] - map.top);
    if (x < -size || y < -size || x > width + size || y > height + size) continue;
    pen.fillStyle = !isShown(row) ? faint : map.codes ? fill(map.codes[row]) : plain;
    pen.fillRect(x - size / 2, y - size / 2, size, size);
  }
  const ring = (row, stroke, radius) => {
    if (!(row < map.x.length)) return;
    pen.strokeStyle = stroke;
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(toX(map.x[row]), toY(map.y[row]), radius, 0, 7);
    pen.stroke();
  };
  if (map.selected.size <= 2000) for (const row of map.selected) ring(row, color("--ink"), size / 2 + 2);
  for (const row of map.neighbors) ring(row, color("--accent"), size / 2 + 4);
  for (const { row } of query.positives) ring(row, color("--hit"), size / 2 + 8);
  if (map.path.length > 1) {
    pen.strokeStyle = color("--accent");
    pen.lineWidth = 2;
    pen.beginPath();
    map.path.forEach(([x, y]) => pen.lineTo(x, y));
    pen.closePath();
    pen.stroke();
  }
}

function zoom(by, x = $("canvas").clientWidth / 2, y = $("canvas").clientHeight / 2) {
  const [px, py] = [fromX(x), fromY(y)];
  map.scale = Math.max(0.5, Math.min(500, map.scale * by));
  map.left += px - fromX(x);
  map.top += py - fromY(y);
  drawMap();
}

function pan(x, y) {
  map.left -= x / (side() * map.scale);
  map.top -= y / (side() * map.scale);
  drawMap();
}

function whole() {
  Object.assign(map, { scale: 1, left: 0, top: 0 });
  drawMap();
}

// Whether a point is within a polygon: an odd number of its edges lie to the right.
function within(path, x, y) {
  let inside = false;
  for (let i = 0, j = path.length - 1; i < path.length; j = i++) {
    const [xi, yi] = path[i], [xj, yj] = path[j];
    if (yi > y !== yj > y && x < (xj - xi) * (y - yi) / (yj - yi) + xi) inside = !inside;
  }
  return inside;
}

const select = guarded(async (path) => {
  map.selected = new Set();
  for (let row = 0; row < map.x.length; row++) {
    if (isShown(row) && within(path, toX(map.x[row]), toY(map.y[row]))) map.selected.add(row);
  }
  const rows = [...map.selected].slice(0, LISTED);
  const { images } = rows.length ? await (await ask(`/api/rows?rows=${rows}&count=${LISTED}`)).json() : { images: [] };
  $("selected").replaceChildren(...images.map((image) => tile(image, false)));
  const count = map.selected.size.toLocaleString("en");
  $("selected-status").textContent = `${count} images selected` + (map.selected.size > LISTED ? `, the first ${LISTED} are listed.` : ".");
  drawMap();
});

function selectView() {
  const { clientWidth: width, clientHeight: height } = $("canvas");
  return select([[0, 0], [width, 0], [width, height], [0, height]]);
}

function listenToMap() {
  const canvas = $("canvas"), pointers = new Map();
  const at = (event) => [event.offsetX, event.offsetY];
  canvas.className = $("mode").value;
  $("mode").onchange = () => { canvas.className = $("mode").value; };
  $("color").onchange = colorMap;
  $("zoom-in").onclick = () => zoom(1.5);
  $("zoom-out").onclick = () => zoom(1 / 1.5);
  $("whole").onclick = whole;
  $("select-view").onclick = selectView;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), ...at(event));
  }, { passive: false });
  canvas.onpointerdown = (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    map.path = [at(event)];
    map.moved = 0;
  };
  canvas.onpointermove = (event) => {
    const before = pointers.get(event.pointerId), [x, y] = at(event);
    if (!before) return;
    map.moved += Math.hypot(x - before[0], y - before[1]);
    if (pointers.size === 2) {  // two fingers zoom
      const [[, other]] = [...pointers].filter(([id]) => id !== event.pointerId);
      const distance = (place) => Math.hypot(place[0] - other[0], place[1] - other[1]) || 1;
      zoom(distance([x, y]) / distance(before), (x + other[0]) / 2, (y + other[1]) / 2);
    } else if ($("mode").value === "pan") {
      pan(x - before[0], y - before[1]);
    } else if ($("mode").value === "box") {
      const [[left, top]] = map.path;
      map.path = [[left, top], [x, top], [x, y], [left, y]];
    } else {
      map.path.push([x, y]);
    }
    pointers.set(event.pointerId, [x, y]);
    drawMap();
  };
  canvas.onpointerup = canvas.onpointercancel = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    const { path } = map;
    map.path = [];
    if (event.type === "pointerup" && map.moved < 4) pick(...at(event));
    else if (event.type === "pointerup" && $("mode").value !== "pan") select(path);
    drawMap();
  };
  canvas.onkeydown = (event) => {
    const moves = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) pan(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") whole();
    else if (event.key === "Enter") selectView();
    else return;
    event.preventDefault();
  };
  new ResizeObserver(drawMap).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

// A click on a point searches by its image.
const pick = guarded(async (x, y) => {
  let nearest = -1, best = 12 ** 2;
  for (let row = 0; row < map.x.length; row++) {
    const far = (toX(map.x[row]) - x) ** 2 + (toY(map.y[row]) - y) ** 2;
    if (far < best && isShown(row)) [nearest, best] = [row, far];
  }
  if (nearest < 0) return;
  const { images } = await (await ask(`/api/rows?rows=${nearest}`)).json();
  await searchBy(images, []);
});

// ---------------------------------------------------------------- start

function describe() {
  const number = (value) => value.toLocaleString("en");
  $("title").textContent = `Search ${about.title}`;
  document.title = `${about.title} - tfdml demo`;
  const distance = { euclidean: "Euclidean", sqeuclidean: "squared Euclidean", cosine: "cosine", dot: "negative dot product" };
  $("summary").textContent = `${number(about.count)} images, embeddings of ${about.dimension} dimensions, `
    + `searched by ${distance[about.distance]} distance.`;
  $("model-name").textContent = about.model;
  $("drop-hint").textContent += `, at most ${about.most_bytes / 2 ** 20} MB`;
  const { calibration } = about;
  const percent = (share) => `${Number((100 * share).toPrecision(2))} %`;
  $("calibration").textContent = calibration
    ? `Two images are called the same up to a distance of ${calibration.threshold.toPrecision(3)}. Of pairs of different classes, `
      + `${percent(calibration.far[0])} are falsely called the same (95 % interval ${percent(calibration.far[1])} to `
      + `${percent(calibration.far[2])}).`
    : "No calibration: the demo does not decide which images are the same. Name one by --calibration.";
  for (const [name, value] of Object.entries(about.metrics)) {
    const shown = value >= 0 && value <= 1 && !Number.isInteger(value) ? `${(100 * value).toFixed(1)} %` : number(value);
    $("metrics").tBodies[0].append(element("tr", {}, element("th", { scope: "row", textContent: name }), element("td", { textContent: shown })));
  }
  $("metrics").hidden = !Object.keys(about.metrics).length;
  $("column").append(...Object.keys(about.columns).map((name) => element("option", { value: name, textContent: name })));
}

guarded(async () => {
  about = await (await ask("/api/about")).json();
  describe();
  listenForImages();
  $("column").onchange = chooseColumn;
  $("value").onchange = filtered;
  $("k").onchange = refresh;
  $("clear").onclick = () => searchBy([], []);
  $("why-close").onclick = () => $("why").close();
  $("previous").onclick = () => turn(-1);
  $("next").onclick = () => turn(1);
  await browse();
  await loadMap();
})();
