"""Style and script of the page, both constant, so that its Content-Security-Policy can name them by their hash.

``policy()`` is the content of that policy: nothing is fetched, and no other style or script runs.
"""

from __future__ import annotations

import base64
import hashlib

__all__ = ["SCRIPT", "STYLE", "policy"]

STYLE = """
:root{color-scheme:light dark;--back:#f6f7f9;--card:#fff;--text:#1b1f24;--quiet:#5b6470;--edge:#dfe3e8;--grid:#e9ecf0;
--main:#2558c7;--worse:#b93807;--better:#0b7167;--wrong:#c4122f;--worse-back:#fdeee6;--better-back:#e3f5f2}
@media(prefers-color-scheme:dark){:root{--back:#0f1216;--card:#171b21;--text:#e7eaee;--quiet:#9aa4b1;--edge:#2a3038;
--grid:#242a32;--main:#7fb0ff;--worse:#ff9a5c;--better:#43d3c1;--wrong:#ff6b81;--worse-back:#3a2418;
--better-back:#12312e}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main,footer{max-width:78rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.75rem}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .35rem}
h2{font-size:1.15rem;margin:0 0 .75rem}
h3{font-size:.95rem;margin:1.25rem 0 .5rem}
p{margin:.25rem 0}
code,.num{font-variant-numeric:tabular-nums}
code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:.92em;overflow-wrap:anywhere}
a{color:var(--main)}
.quiet{color:var(--quiet)}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;list-style:none;margin:1rem 0 0;padding:0}
.facts li{background:var(--card);border:1px solid var(--edge);border-radius:.6rem;padding:.5rem .9rem;min-width:8rem}
.facts b{display:block;font-size:1.3rem;line-height:1.25}
.card{background:var(--card);border:1px solid var(--edge);border-radius:.8rem;padding:1.1rem 1.25rem;margin:1.1rem 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--edge);vertical-align:middle}
th{color:var(--quiet);font-weight:600;white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
td.num,th.num{text-align:right;white-space:nowrap}
th code,td code{overflow-wrap:normal;white-space:nowrap}
td.more{min-width:15rem}
td.more code{white-space:nowrap}
td.first code{white-space:normal;overflow-wrap:break-word}
tbody th{color:inherit}
.tag{display:inline-block;border-radius:1rem;padding:.05rem .6rem;font-weight:600;font-size:.85rem;white-space:nowrap}
.tag.worse{color:var(--worse);background:var(--worse-back)}
.tag.other{color:var(--wrong);border:1px solid}
.tag.better{color:var(--better);background:var(--better-back)}
.bad{color:var(--wrong);font-weight:700}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1.25rem 1.75rem}
figure{margin:0;min-width:0}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:1rem}
figcaption b{font-size:1.05rem;font-variant-numeric:tabular-nums}
.readout{min-height:1.4em;font-size:.82rem;color:var(--quiet);font-variant-numeric:tabular-nums;margin:0}
svg.plot{display:block;width:100%;height:auto;border-radius:.4rem}
svg.plot:focus-visible,summary:focus-visible,a:focus-visible,input:focus-visible{outline:2px solid var(--main);
outline-offset:2px}
svg path{fill:none;stroke-linecap:round;stroke-linejoin:round}
svg text{fill:var(--quiet);font-size:11px}
.grid{stroke:var(--grid)}
.launches{stroke:var(--main);stroke-width:3.4;opacity:.4}
.line{stroke:var(--main);stroke-width:1.5}
.medians{stroke:var(--main);stroke-width:5.5}
.dense .medians{stroke-width:2.5}
.dense .launches{stroke-width:2.2}
svg path.beyond{fill:var(--main);opacity:.6}
.dirty circle{fill:var(--card);stroke:var(--main);stroke-width:1.6}
.wrong{stroke:var(--wrong);stroke-width:2.2}
.level{stroke:var(--text);stroke-width:6;opacity:.13}
svg .level{stroke-linecap:butt}
.worse path,.better path{stroke-width:1.4;stroke-dasharray:4 4}
.worse path{stroke:var(--worse)}.better path{stroke:var(--better)}
svg .worse text{fill:var(--worse);font-weight:700}svg .better text{fill:var(--better);font-weight:700}
.cursor{stroke:var(--quiet);opacity:0}
.cursor.on{opacity:.7}
.hits path{stroke:transparent;stroke-linecap:butt;pointer-events:stroke}
svg.spark{display:block;margin-left:.6rem;width:8.25rem;height:1.75rem}
summary{cursor:pointer;color:var(--main);margin-top:.75rem}
.filter{margin:1rem 0 0}
.filter input{font:inherit;color:inherit;background:var(--card);border:1px solid var(--edge);border-radius:.5rem;
padding:.35rem .7rem;width:min(100%,24rem)}
.legend{font-size:.82rem}
p.legend{margin:1.1rem 0 0}
footer{padding-top:.5rem;padding-bottom:2.5rem;font-size:.85rem}
[hidden]{display:none!important}
@media(max-width:60rem){th,td{padding-right:.6rem}thead th{white-space:normal;vertical-align:bottom}
td.more{min-width:9rem}table{font-size:.82rem}}
@media print{.card{break-inside:avoid}.filter{display:none}}
"""

SCRIPT = """
"use strict";
(() => {
  const root = document.documentElement;
  let plots = 0;
  for (const svg of document.querySelectorAll("svg.plot")) {
    const hits = [...svg.querySelectorAll(".hits path")];
    const cursor = svg.querySelector(".cursor");
    const readout = svg.parentElement.querySelector(".readout");
    if (!hits.length || !readout) continue;
    const usual = readout.textContent;
    let at = hits.length - 1;
    const show = (place) => {
      at = Math.max(0, Math.min(hits.length - 1, place));
      cursor.setAttribute("d", hits[at].getAttribute("d"));
      cursor.classList.add("on");
      readout.textContent = hits[at].firstElementChild.textContent;
    };
    const hide = () => {
      if (document.activeElement === svg) return;
      cursor.classList.remove("on");
      readout.textContent = usual;
    };
    hits.forEach((hit, place) => hit.addEventListener("pointerenter", () => show(place)));
    svg.addEventListener("pointerleave", hide);
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("focus", () => show(at));
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
      if (step) show(at + step);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(hits.length - 1);
      else return;
      event.preventDefault();
    });
    plots += 1;
  }
  const filter = document.querySelector(".filter");
  if (filter) {
    filter.hidden = false;
    filter.querySelector("input").addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const item of document.querySelectorAll("[data-case]")) {
        item.hidden = !item.dataset.case.toLowerCase().includes(wanted);
      }
    });
  }
  root.dataset.plots = String(plots);
})();
"""


def policy() -> str:
    """The Content-Security-Policy: everything forbidden but this style and this script."""
    return (
        f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
