"use strict";
// Sorts the table by the column that is clicked, downwards first for numbers.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const rows = [...table.tBodies[0].rows];
    const values = new Map(rows.map((row) => [row, row.cells[column].dataset.v]));
    const numeric = rows.every((row) => !isNaN(values.get(row)));
    const was = head.getAttribute("aria-sort");
    const first = numeric && column > 0 ? "descending" : "ascending";
    const now = was === first ? (first === "ascending" ? "descending" : "ascending") : first;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", now);
    const sign = now === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [values.get(a), values.get(b)];
      return sign * (numeric ? x - y : x.localeCompare(y));
    });
    table.tBodies[0].append(...rows);
  }));
}
// Hides the layers that do not have what is typed in their name or format.
const filter = document.getElementById("filter");
if (filter) {
  filter.hidden = false;
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const row of document.querySelectorAll("table.sortable tbody tr"))
      row.hidden = !`${row.cells[0].textContent} ${row.cells[2].textContent}`.toLowerCase().includes(wanted);
  });
}
// Memory at the length and number of sequences that the sliders say.
const form = document.getElementById("memory");
if (form) {
  const model = JSON.parse(form.dataset.model);
  const at = (id) => document.getElementById(id);
  const size = (bytes) => {
    let unit = 0;
    while (bytes >= 999.5 && unit < 4) { bytes /= 1000; unit += 1; }
    return `${unit ? bytes.toPrecision(3) : Math.round(bytes)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
  };
  const show = () => {
    const tokens = Math.min(model.most, Math.round(2 ** (at("context").value / 16)));
    const sequences = 2 ** at("batch").value;
    let cache = 0;
    for (const part of model.parts)
      cache += part.layers * part.token_bytes * Math.min(tokens, part.window || tokens) * sequences;
    at("tokens").textContent = tokens.toLocaleString("en");
    at("sequences").textContent = sequences.toLocaleString("en");
    at("total").textContent = size(model.weights + cache);
    at("split").textContent = `weights ${size(model.weights)}, KV cache ${size(cache)}`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  show();
}
