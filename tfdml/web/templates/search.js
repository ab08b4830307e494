// Sends a chosen image as it is, and shows the neighbors of the answer.
const form = document.querySelector("form"), file = document.querySelector("#file"), query = document.querySelector("#query");
async function search(event) {
  const words = form.elements.text;
  if (words && event.type === "change") words.value = "";
  if (!file.files.length || words?.value) return;
  event.preventDefault();
  query.src = URL.createObjectURL(file.files[0]);
  query.hidden = false;
  const results = document.querySelector("#results");
  try {
    const answer = await fetch(`/?k=${form.elements.k.value}&first=${form.elements.first.value}`, { method: "POST", body: file.files[0] });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    results.innerHTML = (page.querySelector("#results") ?? page.body).innerHTML;
  } catch {
    results.textContent = "The server does not respond. Is it still running?";
  }
}
form.addEventListener("submit", search);
file.addEventListener("change", search);
// An image may have been chosen before this script was there.
if (file.files.length) form.requestSubmit();
// An image that is dropped anywhere on the page is the one to search by.
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (!event.dataTransfer.files.length) return;
  file.files = event.dataTransfer.files;
  file.dispatchEvent(new Event("change"));
});
