
"use strict";

// -- tables: click a header to sort; what has no number goes last ------------------------------------------------

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

function sortBy(header) {
  const up = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentElement.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0], column = header.cellIndex;
  const rows = [...body.rows].map((row, index) => ({ row, index, cell: row.cells[column] }));
  rows.sort((a, b) => compare(a.cell, b.cell, up) || a.index - b.index);
  body.append(...rows.map((entry) => entry.row));
}

function compare(a, b, up) {
  const [x, y] = [a, b].map((cell) => "number" in cell.dataset ? Number(cell.dataset.number) : null);
  if (x === null && y === null) return (up ? 1 : -1) * a.textContent.localeCompare(b.textContent);
  if (x === null || y === null) return x === null ? 1 : -1;
  return up ? x - y : y - x;
}
