#include "tools/profile_page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "tools/plot.h"

namespace cubist {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kHead = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>
)html";

constexpr const char* kStyle = R"html(</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2937; margin: 24px auto; max-width: 1180px; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 28px 0 8px; }
.verdict { color: #4b5563; margin: 0 0 4px; } .big { font-size: 26px; font-weight: 600; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 500; color: #6b7280; }
td, th { padding: 2px 10px 2px 0; border-bottom: 1px solid #eee; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.bar { width: 45%; }
.stack { display: flex; height: 14px; background: #f3f4f6; } .stack span { height: 100%; }
.columns { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 28px; } .one { display: block; } .half { width: 50%; }
canvas { width: 100%; border: 1px solid #e5e7eb; display: block; } svg { width: 100%; height: auto; }
.key { display: inline-block; width: 10px; height: 10px; margin: 0 4px 0 12px; }
#tip { position: fixed; background: #111827; color: #fff; padding: 4px 8px; font-size: 12px; pointer-events: none;
  display: none; white-space: pre; border-radius: 3px; z-index: 9; }
.hint { color: #6b7280; font-size: 12px; }
</style></head><body><div id="page"></div><div id="tip"></div>
<script type="application/json" id="data">
)html";

constexpr const char* kScript = R"html(
</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page"), tip = document.getElementById("tip");
const colours = {M: "#dc2626", MTE1: "#f59e0b", MTE2: "#2563eb", MTE3: "#0891b2", FIX: "#7c3aed", V: "#16a34a", S: "#6b7280"};
const text = (s) => String(s).replace(/[&<>"]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\"": "&quot;"})[c]);
const number = (x, d = 1) => x.toLocaleString("en", {minimumFractionDigits: d, maximumFractionDigits: d});
const bytes = (x) => x < 1e3 ? x + " B" : x < 1e6 ? number(x / 1e3) + " kB" : x < 1e9 ? number(x / 1e6) + " MB" : number(x / 1e9, 2) + " GB";
function add(parent, html) { const e = document.createElement("div"); e.innerHTML = html; parent.appendChild(e); return e; }
function table(head, rows) {
  const cell = (tag, c) => typeof c === "object" ? `<${tag} class="${c.of}">${c.is}</${tag}>` : `<${tag}>${text(c)}</${tag}>`;
  return "<table><tr>" + head.map((c) => cell("th", c)).join("") + "</tr>" +
      rows.map((r) => "<tr>" + r.map((c) => cell("td", c)).join("") + "</tr>").join("") + "</table>";
}
const n = (s) => ({of: "n", is: text(s)});
const moved = (x) => n(x ? bytes(x) : "-");
const bar = (parts) => ({of: "bar", is: '<div class="stack">' +
    parts.map(([share, colour]) => `<span style="width:${100 * share}%;background:${colour}"></span>`).join("") + "</div>"});

function pipes(p) {
  return table(["core", "pipe", n("busy %"), n("waiting %"), n("idle %"), ""], p.pipes.map((x) => [x.core, x.pipe,
      n(number(100 * x.busy)), n(number(100 * x.waiting)), n(number(100 * x.idle)),
      bar([[x.busy, colours[x.pipe]], [x.waiting, "#fcd34d"]])]));
}
function critical(p) {
  return table(["cause", n("us"), n("%"), ""], p.critical_path.map((x) => [x.cause, n(number(x.us, 2)),
      n(number(100 * x.share)), bar([[x.share, "#334155"]])]));
}
function traffic(p) {
  return table(["path", n("bytes")], p.paths.map((x) => [x.path, n(bytes(x.bytes))]).concat(
      [["GM read", n(bytes(p.gm_read))], ["GM written", n(bytes(p.gm_written))],
       ["found in L2, %", n(number(100 * p.l2_hit_rate))], ["workspace", n(bytes(p.workspace_bytes))]]));
}
function slack(p) {
  if (!p.slack) return '<p class="hint">Not told of this call: --slack replays it without each flag.</p>';
  const seen = p.slack.rows.filter((x) => x.waited_us >= 0.01 || Math.abs(x.saved_us) >= 0.01);
  return table(["core", "flag", "after", "before", n("flags"), n("waited us"), n("saved us without")],
      seen.map((x) => [x.core, x.flag, x.set, x.wait, n(x.count.toLocaleString("en")), n(number(x.waited_us, 2)), n(number(x.saved_us, 2))]));
}
function lines(p) {
  const most = Math.max(1e-9, ...p.lines.map((x) => x.busy_us));
  return table(["source line", "instruction", "pipe", n("count"), n("bytes"), n("busy us/core"), n("critical us"), ""],
      p.lines.map((x) => [x.file + ":" + x.line, x.instruction, x.pipe, n(x.count.toLocaleString("en")), moved(x.bytes),
      n(number(x.busy_us, 2)), n(number(x.critical_us, 2)), bar([[x.busy_us / most, colours[x.pipe]]])]));
}
function roofline(all) {
  const units = [{of: "roofline", rate: "flops_per_s", name: "Cubes", colour: colours.M},
      {of: "vector_roofline", rate: "operations_per_s", name: "Vector cores", colour: colours.V}];
  const used = units.filter((u) => all.some((p) => p[u.of]["attained_" + u.rate] > 0));
  const roofs = used.length ? used : [units[0]], peak = (u) => all[0][u.of]["peak_" + u.rate], memory = all[0].roofline.peak_bytes_per_s;
  const w = 560, h = 300, l = 60, b = 40, lo = -3, hi = 5, top = Math.log10(Math.max(...roofs.map(peak))) + 0.4, floor = top - 5;
  const x = (v) => l + (Math.min(hi, Math.max(lo, Math.log10(Math.max(v, 1e-9)))) - lo) / (hi - lo) * (w - l - 10);
  const y = (v) => 10 + (top - Math.min(top, Math.max(floor, Math.log10(Math.max(v, 1))))) / (top - floor) * (h - b - 10);
  let s = `<svg viewBox="0 0 ${w} ${h}" font-size="11" font-family="sans-serif">`;
  for (let e = lo; e <= hi; e += 2) s += `<text x="${x(10 ** e)}" y="${h - b + 16}" text-anchor="middle">1e${e}</text>`;
  for (let e = Math.ceil(floor); e <= top; ++e) s += `<line x1="${l}" x2="${w - 10}" y1="${y(10 ** e)}" y2="${y(10 ** e)}" stroke="#eee"/><text x="${l - 6}" y="${y(10 ** e) + 4}" text-anchor="end">1e${e}</text>`;
  roofs.forEach((u) => {
    const most = peak(u), ridge = most / memory, first = Math.max(10 ** lo, 10 ** floor / memory);
    s += `<polyline fill="none" stroke="${u.colour}" stroke-width="2" points="${x(first)},${y(first * memory)} ${x(ridge)},${y(most)} ${x(10 ** hi)},${y(most)}"/>` +
        `<text x="${w - 10}" y="${y(most) - 4}" text-anchor="end" fill="${u.colour}">${u.name}</text>`;
  });
  // A's points are full, B's are rings.
  all.forEach((p, i) => {
    const letter = data.b ? (i ? "B: " : "A: ") : "", mine = used.filter((u) => p[u.of]["attained_" + u.rate] > 0);
    if (!mine.length) s += `<text x="${l + 16}" y="${30 + 16 * i}">${letter}no arithmetic; ${number(100 * p.roofline.share)} % of what HBM gives</text>`;
    mine.forEach((u) => {
      const r = p[u.of], attained = r["attained_" + u.rate], name = `${letter}${number(100 * r.share)} % of the roof`;
      s += `<circle cx="${x(r.intensity)}" cy="${y(attained)}" r="5" fill="${i ? "#fff" : u.colour}" stroke="${u.colour}" stroke-width="2"><title>${u.name}, ${name}</title></circle>` +
          `<text x="${Math.min(x(r.intensity) + 10, w - 150)}" y="${Math.min(y(attained) + 14 + 14 * i, h - b - 18 + 14 * i)}">${name}</text>`;
    });
  });
  return s + `<text x="${w / 2}" y="${h - 6}" text-anchor="middle">FLOP of the Cubes, operations of the Vector cores per byte of HBM</text><text x="4" y="10">per second</text></svg>`;
}
function occupancy(p) {
  const w = 560, h = 70, l = 60;
  return `<div class="${data.b ? "one" : "columns"}">` + p.occupancy.map((o) => {
    const t0 = o.bytes[0][0], t1 = Math.max(o.bytes[o.bytes.length - 1][0], t0 + 1e-9);
    const x = (t) => l + (t - t0) / (t1 - t0) * (w - l - 10), y = (v) => h - 6 - v / o.capacity * (h - 14);
    let d = `M${x(t0)},${y(0)}`, last = 0;
    for (const [t, v] of o.bytes) { d += `L${x(t)},${y(last)}L${x(t)},${y(v)}`; last = v; }
    return `<svg viewBox="0 0 ${w} ${h}" font-size="11" font-family="sans-serif"><rect x="${l}" y="8" width="${w - l - 10}" height="${h - 14}" fill="#f9fafb" stroke="#e5e7eb"/>` +
        `<path d="${d}L${x(t1)},${y(0)}Z" fill="#93c5fd" stroke="#2563eb"/><text x="4" y="24">${text(o.buffer)}</text><text x="4" y="40">${number(100 * o.most / o.capacity, 0)} %</text>` +
        `<text x="4" y="56">${number(o.capacity / 1024, 0)} KiB</text></svg>`;
  }).join("") + "</div>";
}

// A canvas with a track per pipe; the wheel zooms, dragging moves, a double click shows all.
function timeline(parent, t) {
  const rows = t.tracks.length, row = 20, left = 96;
  const canvas = document.createElement("canvas"); canvas.style.height = rows * row + 26 + "px"; parent.appendChild(canvas);
  const all = [t.begin, t.end]; let view = all.slice();
  const byTrack = t.tracks.map(() => []); for (const s of t.slices) byTrack[s[0]].push(s);
  const context = canvas.getContext("2d");
  const scale = () => (canvas.clientWidth - left) / (view[1] - view[0]);
  function draw() {
    const ratio = window.devicePixelRatio || 1; canvas.width = canvas.clientWidth * ratio; canvas.height = canvas.clientHeight * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0); context.font = "11px sans-serif"; const k = scale();
    t.tracks.forEach((name, i) => {
      const y = i * row; context.fillStyle = i % 2 ? "#fff" : "#f9fafb"; context.fillRect(0, y, canvas.clientWidth, row);
      const pipe = name.split(" ").pop(); context.fillStyle = colours[pipe] || "#111827"; let drawn = -1;
      for (const s of byTrack[i]) {
        const x0 = left + (s[2] - view[0]) * k, x1 = x0 + s[3] * k;
        if (x1 < left || x0 > canvas.clientWidth || (x1 < drawn && x1 - x0 < 0.5)) continue;
        const a = Math.max(x0, left); context.fillRect(a, y + 3, Math.max(x1 - a - (x1 - x0 > 4 ? 1 : 0), 0.7), row - 6); drawn = x1;
      }
      context.fillStyle = "#fff"; context.fillRect(0, y, left - 2, row); context.fillStyle = "#111827"; context.fillText(name, 4, y + 14);
    });
    context.fillStyle = "#6b7280"; const steps = 6;
    for (let i = 0; i <= steps; ++i) { const v = view[0] + (view[1] - view[0]) * i / steps; context.fillText(number(v, 2) + " us", Math.min(left + (v - view[0]) * k, canvas.clientWidth - 60), rows * row + 18); }
  }
  const at = (e) => view[0] + (e.offsetX - left) / scale();
  canvas.addEventListener("wheel", (e) => { e.preventDefault(); const c = at(e), f = e.deltaY < 0 ? 0.8 : 1.25;
    view = [Math.max(all[0], c - (c - view[0]) * f), Math.min(all[1], c + (view[1] - c) * f)]; draw(); }, {passive: false});
  let from = null; canvas.addEventListener("mousedown", (e) => { from = [e.offsetX, view.slice()]; });
  window.addEventListener("mouseup", () => { from = null; });
  canvas.addEventListener("dblclick", () => { view = all.slice(); draw(); });
  canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("mousemove", (e) => {
    if (from) { const d = (from[0] - e.offsetX) / scale(), w = from[1][1] - from[1][0];
      const b = Math.min(Math.max(all[0], from[1][0] + d), all[1] - w); view = [b, b + w]; draw(); }
    const i = Math.floor(e.offsetY / row), time = at(e); let hit = null;
    if (i < rows) for (const s of byTrack[i]) if (s[2] <= time && time <= s[2] + s[3]) hit = s;
    tip.style.display = hit ? "block" : "none"; if (!hit) return;
    tip.textContent = `${t.names[hit[1]]}\n${t.lines[hit[4]]}\n${number(hit[2], 3)} us, takes ${number(hit[3], 3)} us` + (hit[5] ? `, ${bytes(hit[5])}` : "");
    tip.style.left = Math.min(e.clientX + 14, window.innerWidth - 260) + "px"; tip.style.top = e.clientY + 14 + "px";
  });
  window.addEventListener("resize", draw); draw();
}

const calls = data.b ? [data.a, data.b] : [data.a];
const key = (colour, name) => `<span class="key" style="background:${colour}"></span>${name}`;
add(page, calls.map((p, i) => `<h1>${data.b ? (i ? "B: " : "A: ") : ""}${text(p.title)}</h1><p class="verdict"><span class="big" id="time${i}">${number(p.time_us, 2)} us</span>${p.interval_us ? ` <span id="interval${i}">${number(p.interval_us[0], 2)} to ${number(p.interval_us[1], 2)} us</span>` : ""} &nbsp; ${text(p.policy)} flags; ${text(p.verdict)}</p>`).join(""));
if (data.b) {
  const [a, b] = calls, row = (name, x, y, d = 2) => [name, n(number(x, d)), n(number(y, d)), n(x > 0 ? number(y / x, 3) : "-")];
  const us = (p, c) => (p.critical_path.find((x) => x.cause === c) || {us: 0}).us;
  const causes = [...new Set(calls.flatMap((p) => p.critical_path.map((x) => x.cause)))];
  add(page, "<h2>Difference</h2>" + table(["", n("A"), n("B"), n("B / A")], [row("time, us", a.time_us, b.time_us),
      row("GM, MB", (a.gm_read + a.gm_written) / 1e6, (b.gm_read + b.gm_written) / 1e6), row("Cube busy, %", 100 * a.cube_busy, 100 * b.cube_busy),
      row("Vector busy, %", 100 * a.vector_busy, 100 * b.vector_busy), row("L2 hits, %", 100 * a.l2_hit_rate, 100 * b.l2_hit_rate)].concat(
      causes.map((c) => row("critical path: " + c + ", us", us(a, c), us(b, c))))));
}
// Of two calls each part bears the letter of its own.
const lettered = (html, i) => `<div>${data.b ? `<p class="hint">${i ? "B" : "A"}</p>` : ""}${html}</div>`;
function section(title, make, wide) {
  add(page, `<h2>${title}</h2><div class="${data.b && !wide ? "columns" : "one"}">` + calls.map((p, i) => lettered(make(p), i)).join("") + "</div>");
}
section(`Pipes, shares of the time over all cores of the chip <span class="hint">${key("#334155", "busy, in the pipe's colour")}${key("#fcd34d", "waiting at a flag")}</span>`, pipes);
section("Critical path, of the core that ends last", critical);
add(page, '<h2>Timeline of that core</h2><p class="hint">Wheel zooms, dragging moves, a double click shows all. Hover for instruction and source line.' +
    Object.entries(colours).map(([k, c]) => key(c, k)).join("") + "</p>");
data.timelines.forEach((t, i) => { const e = add(page, (data.b ? `<p class="hint">${i ? "B" : "A"}</p>` : "") + (t.cut ? `<p class="hint">The first ${t.slices.length.toLocaleString("en")} of ${t.of.toLocaleString("en")} instructions.</p>` : "")); timeline(e, t); });
if (data.b) { add(page, "<h2>Roofline</h2>" + roofline(calls)).className = "half"; section("Traffic", traffic); }
else add(page, '<div class="columns"><div><h2>Roofline</h2>' + roofline(calls) + "</div><div><h2>Traffic</h2>" + traffic(data.a) + "</div></div>");
section("Buffers over time, on that core: bytes still to be read", occupancy);
if (data.a.slack) section("What waits cost", slack, true);
section("Source lines", lines, true);
document.body.dataset.ready = "yes";
</script></body></html>
)html";

// The slices of the core that ends last in the longest phase, numbers in ns precision.
Json TimelineJson(const ProfiledCall& call) {
  constexpr std::size_t kMost = 60000;
  Json json = {{"begin", 0.0},
               {"end", call.profile.time_s * 1e6},
               {"cut", false},
               {"of", 0},
               {"tracks", Json::array()},
               {"names", Json::array()},
               {"lines", Json::array()},
               {"slices", Json::array()}};
  if (call.profile.timeline == nullptr) return json;
  const Analysis& a = call.analysis;
  const auto phase = static_cast<std::uint32_t>(a.critical_phase);
  const bool vector_only = phase < call.record.phases.size() && call.record.phases[phase].vector_only;
  const int per_cube = call.subject.chip.vector_per_cube;
  std::vector<const TimelineSlice*> slices;
  for (const TimelineSlice& slice : *call.profile.timeline) {
    const int core = vector_only ? slice.core * per_cube + slice.lane : slice.core;
    if (slice.phase == phase && core == a.critical_core) slices.push_back(&slice);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const auto* x, const auto* y) { return x->start_us < y->start_us; });
  json["of"] = slices.size();
  if (slices.size() > kMost) slices.resize(kMost), json["cut"] = true;
  std::map<std::pair<int, int>, int> tracks;  // lane and pipe
  std::map<std::string, int> names, lines;
  for (const TimelineSlice* s : slices) tracks[{s->lane, static_cast<int>(s->pipe)}] = 0;
  int count = 0;
  for (auto& [key, number] : tracks) {
    number = count++;
    const std::string side = key.first < 0 ? std::string("Cube") : "Vector " + std::to_string(key.first);
    json["tracks"].push_back(side + " " + NameOf(static_cast<Pipe>(key.second)));
  }
  const auto number_of = [](std::map<std::string, int>& known, const std::string& text, Json& list) {
    const auto [entry, added] = known.emplace(text, static_cast<int>(known.size()));
    if (added) list.push_back(text);
    return entry->second;
  };
  const auto rounded = [](double us) { return std::round(us * 1e4) / 1e4; };
  for (const TimelineSlice* s : slices) {
    json["slices"].push_back(
        {tracks[{s->lane, static_cast<int>(s->pipe)}], number_of(names, s->name, json["names"]),
         rounded(s->start_us), rounded(s->end_us - s->start_us),
         number_of(lines, std::string(s->file) + ":" + std::to_string(s->line), json["lines"]), s->bytes});
  }
  if (!slices.empty()) {
    json["begin"] = rounded(slices.front()->start_us);
    double end = 0;
    for (const TimelineSlice* s : slices) end = std::max(end, s->end_us);
    json["end"] = rounded(end);
  }
  return json;
}

}  // namespace

std::string ProfilePage(const ProfiledCall& a, const ProfiledCall* b) {
  Json data = {{"a", ProfileJson(a)}, {"timelines", Json::array({TimelineJson(a)})}};
  if (b != nullptr) {
    data["b"] = ProfileJson(*b);
    data["timelines"].push_back(TimelineJson(*b));
  }
  // No text of the data may end the script element.
  std::string json = data.dump();
  for (std::size_t at = json.find("</"); at != std::string::npos; at = json.find("</", at))
    json.replace(at, 2, "<\\/");
  return kHead + XmlEscaped(a.subject.Title()) + kStyle + json + kScript;
}

}  // namespace cubist
