"""Draws the output of beside_gloo.py: python/benches/chart.py TIMES.csv > CHART.svg

One panel for each call, time over size, both axes logarithmic; one line for each backend.
"""

import csv
import math
import sys

WIDTH, HEIGHT, LEFT, TOP = 330, 230, 58, 34
COLORS = {"collectives": "#d9480f", "gloo": "#1971c2", "mpi": "#2f9e44"}
SIZES = {4: "4 B", 64: "64 B", 1 << 10: "1 KiB", 1 << 14: "16 KiB", 1 << 18: "256 KiB", 1 << 22: "4 MiB", 1 << 24: "16 MiB", 1 << 26: "64 MiB"}


def read(path):
    """Reads the times in microseconds, by call, backend and size."""
    times = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for column, value in row.items():
                if column.endswith("_us") and int(row["bytes"]) in SIZES:
                    times.setdefault(row["call"], {}).setdefault(column[: -len("_us")], {})[int(row["bytes"])] = float(value)
    return times


def text(x, y, words, anchor="middle", weight="normal", fill="currentColor"):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{words}</text>'


def panel(call, backends, highest, lowest):
    """Returns the panel of one call, with its corner at the origin."""

    sizes = sorted(set().union(*backends.values()))

    def x(size):
        return LEFT + math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0]) * (WIDTH - LEFT - 20)

    def y(time):
        return TOP + (1 - math.log(time / lowest) / math.log(highest / lowest)) * (HEIGHT - TOP - 34)

    parts = [text((WIDTH + LEFT) / 2, 20, call, weight="bold")]
    for size in sizes:
        if size != 1 << 24:  # no space between its neighbours
            parts.append(text(x(size), HEIGHT - 16, SIZES[size]))
    tick = lowest
    while tick <= highest:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(text(LEFT - 6, y(tick) + 4, f"{tick:g} µs" if tick < 1000 else f"{tick / 1000:g} ms", anchor="end"))
        tick *= 10
    for backend, times in backends.items():
        points = " ".join(f"{x(size):.1f},{y(time):.1f}" for size, time in sorted(times.items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[backend]}" stroke-width="2"/>')
    return parts


def main():
    calls = {call: backends for call, backends in read(sys.argv[1]).items() if len(next(iter(backends.values()))) > 1}
    everything = [time for backends in calls.values() for times in backends.values() for time in times.values()]
    lowest, highest = (10 ** round_(math.log10(bound)) for round_, bound in ((math.floor, min(everything)), (math.ceil, max(everything))))
    names = list(next(iter(calls.values())))
    rows = (len(calls) + 1) // 2
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {rows * HEIGHT + 30}" font-family="sans-serif" font-size="11" color="#868e96">')
    for index, (call, backends) in enumerate(calls.items()):
        print(f'<g transform="translate({index % 2 * WIDTH} {index // 2 * HEIGHT})">', *panel(call, backends, highest, lowest), "</g>", sep="\n")
    for index, name in enumerate(names):
        print(text(WIDTH + (index - (len(names) - 1) / 2) * 110, rows * HEIGHT + 14, name, weight="bold", fill=COLORS[name]))
    print("</svg>")


if __name__ == "__main__":
    main()
