"""How the HTML report of a generation looks and reacts: a style sheet and a script, both inlined.

Origins are told apart by more than colour: drafted text has a plain ground, a correction is underlined with dashes, a
bonus with a full line. The hues are Okabe and Ito's, which colour-blind readers tell apart.
"""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f4f5f7; --ink: #1b1f24; --quiet: #5b636e; --line: #d5d9df;
  --drafted: #cfe6f7; --drafted-line: #0072b2; --correction: #fbe3c6; --correction-line: #b34700; --bonus: #d3efe3;
  --bonus-line: #00795a; --rejected: #ffffff; --rejected-line: #b34700; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --card: #20252b; --ink: #e7eaee; --quiet: #a0a9b4;
  --line: #3a424c; --drafted: #123f5c; --drafted-line: #6cbcf0; --correction: #5a3410; --correction-line: #f0a860;
  --bonus: #0f4a3a; --bonus-line: #5fd0ab; --rejected: #15181c; --rejected-line: #f0a860; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 80px; }
h1 { font-size: 22px; margin: 0 0 12px; }
h2 { font-size: 16px; margin: 28px 0 8px; }
.figures { display: flex; flex-wrap: wrap; gap: 8px; margin: 0; }
.figures div { background: var(--card); border-radius: 8px; padding: 8px 14px; }
.figures dt { color: var(--quiet); font-size: 12px; }
.figures dd { margin: 0; font-size: 17px; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { color: var(--quiet); margin: 0 0 10px; }
.legend span { color: var(--ink); padding: 1px 6px; }
.legend i { display: inline-block; width: 18px; }
.note { color: var(--quiet); font-size: 13px; margin: 6px 0 12px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: 8px; padding: 14px 16px;
  margin: 0; font: 14px/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.prompt, .legend .prompt { color: var(--quiet); }
.drafted { background: var(--drafted); border-radius: 3px; box-shadow: inset 1px 0 0 var(--card); }
.correction { background: var(--correction); border-radius: 3px; text-decoration: underline dashed 2px
  var(--correction-line); text-underline-offset: 3px; }
.bonus { background: var(--bonus); border-radius: 3px; text-decoration: underline solid 2px var(--bonus-line);
  text-underline-offset: 3px; }
.chip { display: inline-block; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  padding: 0 5px; border-radius: 4px; border: 1px solid var(--line); white-space: pre; max-width: 20em;
  overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; cursor: default; }
.chip.accepted { background: var(--drafted); border-color: var(--drafted-line); }
.chip.rejected { background: var(--rejected); border: 1px dashed var(--rejected-line);
  text-decoration: line-through 1.5px var(--rejected-line); }
.chip.behind { color: var(--quiet); border-style: dotted; }
.chip.correction { border-color: var(--correction-line); }
.chip.bonus { border-color: var(--bonus-line); }
.bars { overflow-x: auto; background: var(--card); border-radius: 8px; padding: 12px 12px 2px; }
.bars svg { display: block; }
.bars text { font: 10px system-ui, sans-serif; fill: var(--quiet); text-anchor: middle; }
.bars .hit { fill: transparent; }
.bars .accepted { fill: var(--drafted-line); }
.bars .rejected { fill: var(--correction); stroke: var(--rejected-line); }
.bars .behind { fill: var(--line); }
.rounds { list-style: none; margin: 0; padding: 0; }
.rounds li { display: flex; gap: 10px; padding: 4px 8px; border-top: 1px solid var(--line); scroll-margin: 40vh; }
.number, .count { flex: none; color: var(--quiet); font-variant-numeric: tabular-nums; text-align: right; }
.number { width: 2.6em; }
.count { width: 3.4em; }
.chips { display: flex; flex-wrap: wrap; gap: 3px; align-items: center; min-width: 0; }
.chips b { color: var(--quiet); font-weight: 400; padding: 0 3px; }
[data-round].same { outline: 2px solid var(--quiet); outline-offset: -1px; border-radius: 4px; }
g[data-round] { cursor: pointer; }
g[data-round].same .hit { fill: var(--line); }
g[data-round].same { outline: none; }
:focus-visible { outline: 2px solid var(--drafted-line); }
#tip { position: fixed; z-index: 9; pointer-events: none; max-width: 26em; white-space: pre-wrap;
  background: var(--ink); color: var(--ground); border-radius: 6px; padding: 6px 10px;
  font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono",
  Menlo, Consolas, monospace; box-shadow: 0 3px 12px rgb(0 0 0 / 30%); }
@media print { .rounds li { break-inside: avoid; } }
"""

SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
function show(element) {
  tip.textContent = element.dataset.tip;
  tip.hidden = false;
  const at = element.getClientRects()[0] || element.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - tip.offsetWidth - 8);
  const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (below ? at.bottom + 6 : Math.max(4, at.top - tip.offsetHeight - 6)) + "px";
}
function mark(number) {
  for (const element of document.querySelectorAll(".same")) element.classList.remove("same");
  if (number !== undefined)
    for (const element of document.querySelectorAll(`[data-round="${number}"]`)) element.classList.add("same");
}
function enter(event) {
  const element = event.target.closest("[data-tip]");
  if (element) show(element); else tip.hidden = true;
  const part = event.target.closest("[data-round]");
  mark(part ? part.dataset.round : undefined);
}
document.addEventListener("mouseover", enter);
document.addEventListener("focusin", enter);
document.addEventListener("click", event => {
  const part = event.target.closest("g[data-round], pre [data-round]");
  if (part) document.getElementById("round-" + part.dataset.round).scrollIntoView({ block: "center" });
});
document.addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, true);
document.documentElement.dataset.ready = "yes";
"""
