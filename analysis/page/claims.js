"use strict";
// Shows the claims of one paper, with one verdict, or with some words.
(() => {
  const form = document.getElementById("filter");
  const rows = [...document.querySelectorAll("#claims tbody tr")];
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const { paper, verdict, words } = form.elements;
    let count = 0;
    for (const row of rows) {
      const other = (paper.value && row.dataset.paper !== paper.value) || (verdict.value && row.dataset.verdict !== verdict.value);
      row.hidden = other || !row.textContent.toLowerCase().includes(words.value.toLowerCase());
      count += !row.hidden;
    }
    form.querySelector("output").textContent = `${count} of ${rows.length} claims`;
  });
})();
