"use strict";
const $ = (selector) => document.querySelector(selector);
const rows = [...document.querySelectorAll("tbody tr")];
const heads = [...document.querySelectorAll("thead th")].slice(1);
const asked = JSON.parse($("#asked").textContent);
const panel = $("aside"), search = $("#search");
const chips = [...document.querySelectorAll(".chip")];
let texts = null, current = null, marks = [], at = 0;

chips.forEach((chip) => {
  const count = document.querySelectorAll(`td.${chip.dataset.status}`).length;
  chip.firstElementChild.textContent = count.toLocaleString("en");
  chip.disabled = !count;
});

const cellsOf = (row) => row.cells.length > 1 ? [...row.cells].slice(1) : [];
const shownRows = () => rows.filter((row) => !row.hidden);

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.status);
  texts ??= rows.map((row) => [...row.cells].map((cell) => cell.textContent.toLowerCase()));
  let shown = 0;
  rows.forEach((row, number) => {
    const name = texts[number][0];
    // A word may stand in the file's name; the others then all stand in one answer.
    const left = words.filter((word) => !name.includes(word));
    let any = false;
    cellsOf(row).forEach((cell, column) => {
      const text = texts[number][column + 1];
      const kind = !wanted.length || wanted.some((status) => cell.classList.contains(status));
      const match = kind && left.every((word) => text.includes(word));
      any ||= match;
      cell.classList.toggle("hit", match && left.length > 0);
      cell.classList.toggle("dim", !match && (wanted.length > 0 || left.length > 0));
    });
    row.hidden = !any;
    shown += any;
  });
  $(".none").hidden = shown > 0;
  $("#shown").textContent = shown === rows.length ? "" : `; ${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} documents shown`;
}

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function details(cell) {
  const row = cell.parentElement;
  const source = JSON.parse(document.getElementById(row.id + "-cells").textContent);
  const pages = document.getElementById(source.pages);
  return { ...source.cells[cell.cellIndex - 1], pages: pages ? JSON.parse(pages.textContent) : {} };
}

function show(cell) {
  current?.removeAttribute("aria-selected");
  current = cell;
  cell.setAttribute("aria-selected", "true");
  const found = details(cell), column = cell.cellIndex - 1;
  const shown = cell.querySelector("div").textContent;
  $("aside h2").textContent = heads[column].textContent;
  $("aside .document").textContent = cell.parentElement.cells[0].firstChild.textContent;
  $("aside .question").textContent = asked[column];
  $("aside .answer").textContent = shown;
  $("aside .words").textContent = found.words ?? "";
  const facts = [element("span", found.status.replace("_", " "), found.status)];
  if (found.status === "answered") facts.push(element("span", found.verified ? "quote verified" : "no quote", found.verified ? "good" : "look"));
  if (found.merged) facts.push(element("span", found.merged));
  if (found.doubt) facts.push(element("span", found.doubt, "look"));
  const page = $("aside .page");
  page.replaceChildren(...(found.sheets ?? []).flatMap(([number, spans]) => sheet(number, found.pages[number], spans)));
  marks = [...page.querySelectorAll("mark")];
  if (!marks.length && found.status === "answered") page.append(element("p", "No words of this answer were found in the document.", "question"));
  $("aside .facts").replaceChildren(...facts);
  $("#jumps").replaceChildren(...(found.sheets ?? []).map(([number]) => jump(number)));
  $("aside .places").hidden = !marks.length;
  ["#earlier", "#place", "#later"].forEach((name) => { $(name).hidden = marks.length < 2; });
  panel.hidden = false;
  history.replaceState(null, "", `#${cell.parentElement.id}-${column + 1}`);
  page.scrollTop = 0;
  point(0);
  cell.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function sheet(number, text, spans) {
  const made = document.createElement("pre");
  let end = 0;
  spans.forEach(([start, stop]) => {
    made.append(text.slice(end, start), element("mark", text.slice(start, stop)));
    end = stop;
  });
  made.append(text.slice(end));
  const head = element("h3", `Page ${number}`);
  head.id = `page-${number}`;
  return [head, made];
}

function jump(number) {
  const made = element("button", `page ${number}`, "jump");
  made.addEventListener("click", () => point(marks.findIndex((mark) => mark.parentElement.previousElementSibling.id === `page-${number}`)));
  return made;
}

// Brings a highlighted place, counted round, into sight.
function point(number) {
  if (!marks.length) return;
  marks[at]?.classList.remove("here");
  at = (number + marks.length) % marks.length;
  marks[at].classList.add("here");
  marks[at].scrollIntoView({ block: "center" });
  $("#place").textContent = `${at + 1} of ${marks.length}`;
}

function close() {
  panel.hidden = true;
  history.replaceState(null, "", "#");
  current?.removeAttribute("aria-selected");
  current?.focus();
}

function step(down, right) {
  const from = document.activeElement.closest?.("td") ?? current;
  const visible = shownRows();
  if (!visible.length) return;
  if (!from || from.parentElement.hidden) return focus(visible[0].cells[1]);
  const row = visible[Math.min(visible.length - 1, Math.max(0, visible.indexOf(from.parentElement) + down))];
  focus(row.cells[Math.min(row.cells.length - 1, Math.max(1, from.cellIndex + right))]);
}

function focus(cell) {
  cell.focus({ preventScroll: true });
  const box = $("main"), left = cell.parentElement.cells[0].offsetWidth, top = $("thead").offsetHeight;
  if (cell.offsetLeft < box.scrollLeft + left) box.scrollLeft = cell.offsetLeft - left;
  if (cell.offsetLeft + cell.offsetWidth > box.scrollLeft + box.clientWidth) box.scrollLeft = cell.offsetLeft + cell.offsetWidth - box.clientWidth;
  const y = cell.offsetTop;
  if (y < box.scrollTop + top) box.scrollTop = y - top;
  if (y + cell.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = y + cell.offsetHeight - box.clientHeight;
  if (!panel.hidden) show(cell);
}

// A link to an answer ends in #d<document>-<question>, one to a search in #q=<words>.
function open() {
  const hash = decodeURIComponent(location.hash.slice(1)), place = /^(d\d+)-(\d+)$/.exec(hash);
  const cell = place && document.getElementById(place[1])?.cells[Number(place[2])];
  if (hash.startsWith("q=")) { search.value = hash.slice(2); filter(); }
  else if (cell) focus(cell), show(cell);
}

$("tbody").addEventListener("click", (event) => {
  const cell = event.target.closest("td");
  if (cell) { cell.focus({ preventScroll: true }); show(cell); }
});
search.addEventListener("input", filter);
chips.forEach((chip) => chip.addEventListener("click", () => {
  chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") !== "true");
  filter();
}));
$("#close").addEventListener("click", close);
$("#before").addEventListener("click", () => step(-1, 0));
$("#after").addEventListener("click", () => step(1, 0));
$("#earlier").addEventListener("click", () => point(at - 1));
$("#later").addEventListener("click", () => point(at + 1));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === search) {
    if (event.key === "Escape") { search.value = ""; filter(); search.blur(); }
    if (event.key === "Enter" || event.key === "ArrowDown") { event.preventDefault(); step(0, 0); }
    return;
  }
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key === "/") { event.preventDefault(); search.select(); search.focus(); }
  else if (moves[event.key]) { event.preventDefault(); step(...moves[event.key]); }
  else if (event.key === "Enter" && event.target.matches("td")) show(event.target);
  else if (event.key === "Escape") close();
  else if (!panel.hidden && (event.key === "n" || event.key === "p")) point(at + (event.key === "n" ? 1 : -1));
});
window.addEventListener("hashchange", open);
open();
