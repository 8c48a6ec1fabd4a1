"use strict";
// Shows the claims of one paper, with one verdict, or with some words, which may be in closed details; opens all to print.
(() => {
  const form = document.getElementById("filter");
  const rows = [...document.querySelectorAll(".claim")];
  const texts = new Map(rows.map((row) => [row, [...row.querySelectorAll("summary span, dd")].map((part) => part.textContent).join("\n").toLowerCase()]));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const { paper, verdict, words } = form.elements;
    let count = 0;
    for (const row of rows) {
      const other = (paper.value && row.dataset.paper !== paper.value) || (verdict.value && row.dataset.verdict !== verdict.value);
      row.hidden = other || !texts.get(row).includes(words.value.toLowerCase());
      count += !row.hidden;
    }
    for (const group of document.querySelectorAll(".claims")) group.hidden = !group.querySelector(".claim:not([hidden])");
    form.querySelector("output").textContent = `${count} of ${rows.length} claims`;
  });

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
})();
