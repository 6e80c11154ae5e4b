"""The style sheet of report.html, but for the colours of its curves (``curve_colours``)."""

CSS = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1c1a; --soft: #63635e; --line: #e3e3de; --good: #00701f; --bad: #b42318;
  --bad-page: #fdecea; --note-page: #fff6dd; --note: #7a5300; }
@media (prefers-color-scheme: dark) { :root {
  --page: #151514; --card: #1f1f1d; --ink: #f1f1ee; --soft: #a3a39c; --line: #363633; --good: #5fce7d; --bad: #ff8a80;
  --bad-page: #3a1a18; --note-page: #33290f; --note: #f0cc74; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 0; }
.soft { color: var(--soft); }
.facts { margin-top: 6px; }
.banner { margin-top: 16px; padding: 12px 16px; border-radius: 10px; background: var(--note-page); color: var(--note); }
.banner.bad { background: var(--bad-page); color: var(--bad); }
.banner pre { color: var(--ink); }
.cards { display: grid; gap: 12px; margin-top: 20px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card, figure, .sample, details.box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650; white-space: nowrap; }
.card.main { grid-column: span 2; }
.card .up { color: var(--good); } .card .down { color: var(--bad); }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; padding: 12px 14px 8px; display: flex; flex-direction: column; }
figure .soft { font-size: 13px; line-height: 1.4; }
figure svg { margin-top: auto; padding-top: 6px; }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 4px 12px; flex-wrap: wrap; }
.legend { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; white-space: pre; }
.tick { fill: var(--soft); } .grid { stroke: var(--line); }
.raw, .line { fill: none; stroke: var(--color); stroke-linejoin: round; stroke-linecap: round; }
.raw { opacity: .3; } .line { stroke-width: 2; } .dot { fill: var(--color); stroke: var(--card); }
.area { fill: var(--color); stroke: var(--card); stroke-width: .5; }
.at rect { fill: transparent; } .at circle, .at text { opacity: 0; pointer-events: none; }
.at:hover rect { fill: var(--ink); fill-opacity: .07; } .at:hover circle, .at:hover text { opacity: 1; }
.at circle { fill: var(--ink); } .at text { fill: var(--ink); }
.sides { display: grid; gap: 12px 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.sides h3 { margin-bottom: 8px; }
table { width: 100%; border-collapse: separate; border-spacing: 0; table-layout: fixed; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; font-size: 13px; }
th { text-align: left; font-weight: 600; color: var(--soft); overflow-wrap: normal; }
th, td { padding: 8px 12px; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child > td { border-bottom: 0; }
th:last-child { width: 136px; }
td > pre { max-height: 180px; }
td > .special, :root:has(#special:checked) td > .plain { display: none; }
:root:has(#special:checked) td > .special { display: block; }
pre { margin: 0; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
td b { display: block; font-size: 15px; }
td b, td span { overflow-wrap: break-word; }
details.box { padding: 10px 14px; margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
details pre, details .charts { margin-top: 10px; }
.versions { display: flex; flex-wrap: wrap; gap: 2px 20px; margin-top: 8px; }
@media (max-width: 560px) {
  body { padding: 16px 12px 32px; }
  h1 { font-size: 22px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  .card { padding: 10px 12px; } .card b { font-size: 20px; } .card.main b { font-size: 24px; }
  thead { display: none; } table, tbody, tr, td { display: block; }
  tr { border-bottom: 1px solid var(--line); padding: 6px 0; } tr:last-child { border-bottom: 0; }
  td { border: 0; padding: 4px 12px; } td::before { content: attr(data-label); color: var(--soft); font-size: 12px; }
  td b { display: inline; margin-left: 6px; } td span { display: block; }
}
@media print { .at { display: none; } body { background: none; } }
"""
