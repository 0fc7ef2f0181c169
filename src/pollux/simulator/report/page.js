"use strict";
// A click on a heading sorts its table by that column, a second one the other way round; what is missing stays last.
const order = new Intl.Collator("en", { numeric: true });

function keyOf(row, column, isNumber) {
  const cell = row.cells[column];
  const key = cell.dataset.key ?? (isNumber ? "" : cell.textContent);
  return isNumber && key !== "" ? Number(key) : key;
}

function sort(heading) {
  const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
  const isNumber = heading.classList.contains("n");
  const turn = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = Array.from(body.rows, row => [keyOf(row, column, isNumber), row]);
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    return turn * (isNumber ? a - b : order.compare(a, b));
  });
  body.append(...rows.map(([, row]) => row));
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", turn === 1 ? "ascending" : "descending");
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentNode));
}
