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
