#!/usr/bin/env python3
"""Draws the README's pictures from what the command wrote: see scripts/pictures.sh, which runs both.

pictures.py timeline TRACE.json PROFILE.json OUT.svg
pictures.py roofline OUT.svg PROFILE.json..
pictures.py ablation ABLATION.json OUT.svg TITLE
"""

import json
import math
import sys
from html import escape

INK, FAINT, GRID = "#1f2328", "#59636e", "#d1d9e0"
COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948"]
OTHERS = "#bab0ac"


class Svg:
    """A picture on white, so that it reads on dark pages too."""

    def __init__(self, width, height):
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]

    def rect(self, x, y, width, height, fill, title=""):
        inner = f"<title>{escape(title)}</title>" if title else ""
        self.lines.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}">{inner}</rect>'
        )

    def line(self, x0, y0, x1, y1, stroke=GRID, width=1):
        self.lines.append(
            f'<line x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def circle(self, x, y, radius, fill):
        self.lines.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{fill}"/>')

    def text(self, x, y, text, anchor="start", fill=INK, size=12, weight="normal"):
        self.lines.append(
            f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def write(self, path):
        with open(path, "w") as file:
            file.write("\n".join([*self.lines, "</svg>"]) + "\n")


def load(path):
    with open(path) as file:
        return json.load(file)


def nice_step(span, count):
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw)


def timeline(trace, profile, out):
    """One AI core in the middle of the run: a row per pipe of its Cube core and of its first Vector core."""
    events, profile = load(trace)["traceEvents"], load(profile)
    names, threads = {}, {}
    for e in events:
        if e["ph"] == "M" and e["name"] == "process_name":
            names[e["pid"]] = e["args"]["name"]
        elif e["ph"] == "M" and e["name"] == "thread_name":
            threads[e["pid"], e["tid"]] = e["args"]["name"]
    slices = [e for e in events if e["ph"] == "X"]
    core = min(pid for pid, name in names.items() if name.startswith("AIC"))
    vector = min(pid for pid, name in names.items() if name.startswith("AIV"))
    begin = 0.45 * profile["time_us"]
    span = min(12.0, 0.2 * profile["time_us"])
    end = begin + span
    shown = [e for e in slices if e["pid"] in (core, vector) and e["ts"] < end and e["ts"] + e["dur"] > begin]
    rows = sorted({(e["pid"], e["tid"]) for e in shown})
    kinds = sorted({e["name"] for e in shown}, key=lambda n: -sum(e["dur"] for e in shown if e["name"] == n))
    colour = {kind: COLOURS[i] if i < len(COLOURS) else OTHERS for i, kind in enumerate(kinds)}

    left, top, width, height = 110, 56, 820, 26
    bottom = top + height * len(rows)
    svg = Svg(left + width + 20, bottom + 70)
    svg.text(left, 22, f"{profile['title']}: {span:.0f} us of one AI core", weight="bold", size=14)
    svg.text(left, 40, f"{profile['time_us']:.0f} us in all; {profile['verdict']}", fill=FAINT)
    step = nice_step(span, 6)
    tick = math.ceil(begin / step) * step
    while tick <= end:
        x = left + width * (tick - begin) / span
        svg.line(x, top, x, bottom)
        svg.text(x, bottom + 16, f"{tick:g} us", "middle", FAINT)
        tick += step
    for i, key in enumerate(rows):
        y = top + height * i
        svg.text(left - 8, y + 17, f"{'Cube' if key[0] == core else 'Vector'} {threads.get(key, '')}", "end")
        for e in (e for e in shown if (e["pid"], e["tid"]) == key):
            x0, x1 = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
            svg.rect(
                left + width * (x0 - begin) / span,
                y + 3,
                max(width * (x1 - x0) / span, 0.3),
                height - 6,
                colour[e["name"]],
            )
    x = left
    others = [("others", OTHERS)] if len(kinds) > len(COLOURS) else []
    for kind, fill in [*((k, colour[k]) for k in kinds[: len(COLOURS)]), *others]:
        svg.rect(x, bottom + 32, 10, 10, fill)
        svg.text(x + 14, bottom + 41, kind)
        x += 30 + 7.2 * len(kind)
    svg.write(out)


def roofline(out, *profiles):
    """Kernels under the roof of their chip, both axes logarithmic."""
    profiles = [p for p in map(load, profiles) if p["roofline"]["flops"] > 0]
    roof = profiles[0]["roofline"]
    peak, bandwidth = roof["peak_flops_per_s"], roof["peak_bytes_per_s"]
    low_x, high_x = 10, 4000
    low_y, high_y = 5e12, 6e14
    left, top, width, height = 70, 50, 560, 330

    def at(x, y):
        return (
            left + width * math.log(x / low_x) / math.log(high_x / low_x),
            top + height * (1 - math.log(y / low_y) / math.log(high_y / low_y)),
        )

    svg = Svg(left + width + 250, top + height + 50)
    svg.text(left, 24, f"Roofline of {profiles[0]['chip']}", weight="bold", size=14)
    for x in (10, 30, 100, 300, 1000, 3000):
        svg.line(*at(x, low_y), *at(x, high_y))
        svg.text(at(x, low_y)[0], top + height + 16, f"{x}", "middle", FAINT)
    for y in (10, 30, 100, 300):
        svg.line(*at(low_x, y * 1e12), *at(high_x, y * 1e12))
        svg.text(left - 6, at(low_x, y * 1e12)[1] + 4, f"{y}", "end", FAINT)
    svg.text(left + width / 2, top + height + 38, "FLOP per byte from and to HBM", "middle", FAINT)
    svg.text(left - 50, top - 8, "TFLOP/s", fill=FAINT)
    ridge = peak / bandwidth
    svg.line(*at(max(low_x, low_y / bandwidth), max(low_x * bandwidth, low_y)), *at(ridge, peak), INK, 2)
    svg.line(*at(ridge, peak), *at(high_x, peak), INK, 2)
    svg.text(at(high_x, peak)[0], at(high_x, peak)[1] - 6, f"{peak / 1e12:.0f} TFLOP/s", "end")
    slope_x, slope_y = at(20, 20 * bandwidth)
    svg.text(slope_x + 10, slope_y + 14, f"{bandwidth / 1e12:.2f} TB/s")
    for i, p in enumerate(profiles):
        r = p["roofline"]
        x, y = at(min(max(r["intensity"], low_x), high_x), min(max(r["attained_flops_per_s"], low_y), high_y))
        svg.circle(x, y, 5, COLOURS[i % len(COLOURS)])
        key_y = top + 14 + 34 * i
        svg.circle(left + width + 18, key_y - 4, 5, COLOURS[i % len(COLOURS)])
        svg.text(left + width + 30, key_y, f"{p['kernel']}: {100 * r['share']:.0f} % of the roof")
        svg.text(left + width + 30, key_y + 14, f"{p['shape']} {p['dtype']}", fill=FAINT, size=10)
    svg.write(out)


def ablation(path, out, title):
    """What each idea is worth: geometric means over the cases, from the conventional kernel to ours."""
    cases = load(path)
    names = []
    for case in cases:
        names += [s["name"] for s in case["steps"] if s["name"] not in names]
    means = []
    for name in names:
        ratios = [
            math.log(s["time_us"] / case["steps"][-1]["time_us"])
            for case in cases
            for s in case["steps"]
            if s["name"] == name
        ]
        means.append(math.exp(sum(ratios) / len(ratios)))
    left, top, width, height = 300, 56, 480, 30
    svg = Svg(left + width + 80, top + height * len(names) + 20)
    svg.text(20, 24, title, weight="bold", size=14)
    svg.text(20, 42, f"time over ours, geometric mean of {len(cases)} shapes; modelled", fill=FAINT)
    for i, (name, mean) in enumerate(zip(names, means)):
        y = top + height * i
        svg.text(left - 8, y + 18, name, "end")
        svg.rect(
            left,
            y + 4,
            width * mean / max(means),
            height - 9,
            COLOURS[2] if i == len(names) - 1 else COLOURS[0],
        )
        svg.text(left + width * mean / max(means) + 6, y + 18, f"{mean:.2f}")
    svg.write(out)


if __name__ == "__main__":
    commands = {"timeline": timeline, "roofline": roofline, "ablation": ablation}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
