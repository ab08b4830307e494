"use strict";

// Tables: the heads of columns become buttons that sort by them.
function cellValue(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace(/,/g, "").replace("−", "-"));
  return { missing: text === "–" || text === "", number, text };
}

function sortTable(table, column, descending) {
  const sign = descending ? -1 : 1;
  const rows = Array.from(table.tBodies[0].rows, (row) => ({ row, value: cellValue(row, column) }));
  const numeric = rows.every(({ value }) => value.missing || !Number.isNaN(value.number));
  rows.sort((a, b) => {
    // What is missing comes last either way.
    if (a.value.missing || b.value.missing) return a.value.missing - b.value.missing;
    if (numeric) return sign * (a.value.number - b.value.number);
    return sign * a.value.text.localeCompare(b.value.text, undefined, { numeric: true });
  });
  table.tBodies[0].append(...rows.map(({ row }) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortTable(table, column, descending);
    });
  });
}

// The contents are folded on a phone, where a choice folds them again.
const contents = document.getElementById("contents");
const phone = matchMedia("(max-width: 560px)");
const fold = () => (contents.open = !phone.matches);
phone.addEventListener("change", fold);
contents.addEventListener("click", (event) => event.target.closest("a") && fold());
fold();

// The map: the point that is pointed at, or stepped to with the arrow keys, shows its image and its class.
function startMap(data) {
  const map = document.getElementById("map");
  const figure = map.querySelector("svg");
  const sheet = document.getElementById("map-sheet");
  const count = data.x.length;
  const [width, height] = [figure.viewBox.baseVal.width, figure.viewBox.baseVal.height];
  const make = (tag, css, parent) => {
    const element = document.createElement(tag);
    element.className = css;
    parent.append(element);
    return element;
  };
  const draw = (css) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", css);
    figure.append(path);
    return path;
  };
  const ring = (i, r) => `M${data.x[i] - r} ${data.y[i]}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
  const members = data.classes.map(() => []);
  data.class.forEach((number, i) => members[number].push(i));

  const chosen = draw("chosen");
  const cursor = draw("cursor");
  const tip = make("div", "tip", map);
  tip.setAttribute("aria-hidden", "true");
  tip.hidden = true;
  const canvas = make("canvas", "", tip);
  canvas.width = canvas.height = data.cell;
  const name = make("span", "name", tip);
  const controls = document.createElement("div");
  controls.className = "map-controls";
  map.before(controls);
  map.closest(".map-columns").before(controls);
  const label = make("label", "", controls);
  label.textContent = "Ring a class: ";
  const select = make("select", "", label);
  select.append(new Option("none", ""));
  data.classes
    .map((text, number) => [text, number])
    .sort((a, b) => a[0].localeCompare(b[0], undefined, { numeric: true }))
    .forEach(([text, number]) => select.append(new Option(text, number)));
  const status = make("p", "soft", controls);
  status.setAttribute("role", "status");
  status.textContent = "Point at the map, or step through it with the arrow keys.";

  let current = -1;
  function show(i, announce) {
    if (i === current && !announce) return;
    current = i;
    cursor.setAttribute("d", i < 0 ? "" : ring(i, 8));
    tip.hidden = i < 0;
    if (i < 0) return;
    const context = canvas.getContext("2d");
    const [column, row] = [i % data.columns, Math.floor(i / data.columns)];
    context.clearRect(0, 0, data.cell, data.cell);
    context.drawImage(sheet, column * data.cell, row * data.cell, data.cell, data.cell, 0, 0, data.cell, data.cell);
    const kind = data.classes[data.class[i]];
    name.textContent = kind;
    const box = figure.getBoundingClientRect();
    const left = (data.x[i] / width) * box.width;
    const top = (data.y[i] / height) * box.height;
    const besideRight = left + 24 + tip.offsetWidth <= box.width;
    tip.style.left = `${Math.max(0, besideRight ? left + 14 : Math.max(0, left - 14 - tip.offsetWidth))}px`;
    tip.style.top = `${Math.min(Math.max(0, top - tip.offsetHeight / 2), box.height - tip.offsetHeight)}px`;
    if (announce) {
      const others = members[data.class[i]];
      status.textContent = `${kind}, image ${others.indexOf(i) + 1} of ${others.length}: ${data.names[i]}`;
    }
  }

  function place(event) {
    const box = figure.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
  }

  function nearest(x, y, reach) {
    let best = -1;
    let least = reach * reach;
    for (let i = 0; i < count; i++) {
      const gap = (data.x[i] - x) ** 2 + (data.y[i] - y) ** 2;
      if (gap < least) [best, least] = [i, gap];
    }
    return best;
  }

  // The next point in a direction: not far along it, and hardly aside.
  function next(from, dx, dy) {
    let best = from;
    let least = Infinity;
    for (let i = 0; i < count; i++) {
      const [x, y] = [data.x[i] - data.x[from], data.y[i] - data.y[from]];
      const along = x * dx + y * dy;
      const aside = Math.abs(x * dy - y * dx);
      if (i !== from && along > 0.05 && aside <= 2 * along && along + 2 * aside < least) {
        [best, least] = [i, along + 2 * aside];
      }
    }
    return best;
  }

  map.tabIndex = 0;
  map.setAttribute("role", "application");
  map.setAttribute("aria-label", "Embedding map: the arrow keys step from image to image, Escape leaves the image");
  figure.addEventListener("pointermove", (event) => show(nearest(...place(event), 16), false));
  figure.addEventListener("pointerdown", (event) => show(nearest(...place(event), 28), true));
  map.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(-1, false));
  map.addEventListener("blur", () => show(-1, false));
  map.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") show(-1, false);
    if (!step) return;
    event.preventDefault();
    const start = select.value === "" ? nearest(width / 2, height / 2, Infinity) : members[select.value][0];
    show(current < 0 ? start : next(current, ...step), true);
  });
  select.addEventListener("change", () => {
    const points = select.value === "" ? [] : members[select.value];
    chosen.setAttribute("d", points.map((i) => ring(i, 6)).join(""));
    status.textContent = points.length ? `${points.length} images of ${data.classes[select.value]} are ringed.` : "";
  });
}

const mapData = document.getElementById("map-data");
if (mapData) startMap(JSON.parse(mapData.textContent));
