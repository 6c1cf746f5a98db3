"use strict";

// The theme: the system's, unless the button was pressed; kept where the browser allows it.
function setUpTheme() {
  const root = document.documentElement;
  const button = document.querySelector("button.theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  try {
    const kept = localStorage.getItem("tightrope-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    // No storage, no memory.
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("tightrope-theme", root.dataset.theme);
    } catch {
      // See above.
    }
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
}

// Rows without a value go to the end, whichever way the table is sorted.
function compareRows(column, direction) {
  const value = (row) => row.cells[column].dataset.value;
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const [p, q] = [Number(x), Number(y)];
    const numeric = !Number.isNaN(p) && !Number.isNaN(q);
    return direction * (numeric ? p - q : x.localeCompare(y, undefined, { numeric: true }));
  };
}

function setUpSorting(table) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    header.querySelector("button").addEventListener("click", () => {
      const before = header.getAttribute("aria-sort");
      // Text begins with A, numbers with the largest; the number of a run is a name, too.
      const first = header.classList.contains("number") && column > 0 ? "descending" : "ascending";
      const turned = before === "ascending" ? "descending" : "ascending";
      const order = before === "none" ? first : turned;
      headers.forEach((other) => other.setAttribute("aria-sort", "none"));
      header.setAttribute("aria-sort", order);
      const body = table.tBodies[0];
      const rows = [...body.rows].sort(compareRows(column, order === "ascending" ? 1 : -1));
      body.append(...rows);
    });
  });
}

// Reading off a chart: the values of the epoch under the pointer, or chosen by arrow keys.
function setUpChart(chart) {
  const figure = chart.closest("figure");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const cursor = chart.querySelector(".cursor");
  const values = [...figure.querySelectorAll(".readout .value")];
  const caption = figure.querySelector("figcaption");
  const epoch = document.createElement("span");
  epoch.className = "epoch";
  caption.append(epoch);
  let chosen = data.places.length - 1;

  const show = (position) => {
    chosen = Math.max(0, Math.min(data.places.length - 1, position));
    cursor.setAttribute("x1", data.places[chosen]);
    cursor.setAttribute("x2", data.places[chosen]);
    chart.classList.add("active");
    epoch.textContent = `epoch ${data.epochs[chosen]}`;
    values.forEach((value, i) => (value.textContent = data.series[i][chosen]));
  };
  const hide = () => {
    chart.classList.remove("active");
    epoch.textContent = "";
    values.forEach((value) => (value.textContent = ""));
  };

  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    let nearest = 0;
    data.places.forEach((place, i) => {
      if (Math.abs(place - x) < Math.abs(data.places[nearest] - x)) nearest = i;
    });
    show(nearest);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("focus", () => show(chosen));
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const last = data.places.length - 1;
    const moves = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    // Older browsers copy what is selected.
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

function setUpCopying(button) {
  const code = button.parentElement.querySelector("code");
  button.hidden = false;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(code)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
}

// The table of contents shows where one is.
function setUpContents() {
  const links = new Map(
    [...document.querySelectorAll("nav.contents a")].map((a) => [a.hash.slice(1), a]),
  );
  const sections = [...document.querySelectorAll("main > section")];
  const mark = () => {
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const above = sections.filter((s) => s.getBoundingClientRect().top < innerHeight * 0.35);
    const current = atEnd && scrollY > 0 ? sections.at(-1) : (above.at(-1) ?? sections[0]);
    links.forEach((link, id) => {
      if (id === current.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  };
  addEventListener("scroll", mark, { passive: true });
  addEventListener("resize", mark);
  mark();
}

// On paper nothing can be opened.
function setUpPrinting() {
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
}

setUpTheme();
document.querySelectorAll("table.sortable").forEach(setUpSorting);
document.querySelectorAll("svg.curves").forEach(setUpChart);
document.querySelectorAll("button.copy").forEach(setUpCopying);
setUpContents();
setUpPrinting();
