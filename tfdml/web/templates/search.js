// Sends a chosen image as it is, and shows the neighbors of the answer.
const form = document.querySelector("form");
const file = document.querySelector("#file");
const query = document.querySelector("#query");
const message = document.querySelector("#message");
const neighbors = document.querySelector("#neighbors");
let sent = new AbortController();

async function search(event) {
  const words = form.elements.text;
  if (words && event.type === "change") words.value = "";
  if (!file.files.length || words?.value) return;
  event.preventDefault();
  show(file.files[0]);
  // The answer to an image that was chosen before would come too late.
  sent.abort();
  sent = new AbortController();
  message.textContent = "Searching ...";
  neighbors.replaceChildren();
  const address = `/?k=${form.elements.k.value}&first=${form.elements.first.value}`;
  try {
    const options = { method: "POST", body: file.files[0], signal: sent.signal };
    const answer = await (await fetch(address, options)).text();
    const page = new DOMParser().parseFromString(answer, "text/html");
    message.innerHTML = (page.querySelector("#message") ?? page.body).innerHTML;
    neighbors.innerHTML = page.querySelector("#neighbors")?.innerHTML ?? "";
  } catch (error) {
    if (error.name === "AbortError") return;
    message.textContent = "The server does not respond. Is it still running?";
  }
}

function show(image) {
  URL.revokeObjectURL(query.src);
  query.src = URL.createObjectURL(image);
  query.hidden = false;
}

form.addEventListener("submit", search);
file.addEventListener("change", search);
// What the browser cannot show; the server says why it is no image.
query.addEventListener("error", () => { query.hidden = true; });
// An image may have been chosen before this script was there.
if (file.files.length) form.requestSubmit();

// An image that is dropped anywhere on the page is the one to search by.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  if (event.dataTransfer.files.length) {
    file.files = event.dataTransfer.files;
    file.dispatchEvent(new Event("change"));
  } else {
    message.textContent = "That is no file: save the image first, or choose it above.";
  }
});
