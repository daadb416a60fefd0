/** A plot of tokens by day, as stacked bars. The table below it has the same numbers. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export interface Day {
  day: string;
  prompt: number;
  completion: number;
}

export const DAY_MS = 86_400_000;
const DAY = DAY_MS / 1000;
const HEIGHT = 200; // pixels
const WHOLE = Array.from({ length: 39 }, (_, n) => ([1, 2, 5][n % 3] as number) * 10 ** Math.floor(n / 3)); // 1, 2, 5, 10 …

export function Plot({ days }: { days: Day[] }) {
  const box = useRef<HTMLDivElement>(null);
  const [pointed, point] = useState<number | null>(null);
  const drawn = JSON.stringify(days);
  useEffect(() => (box.current === null ? undefined : draw(box.current, days, point)), [drawn]);
  const highest = Math.max(1, ...days.map((one) => one.prompt + one.completion));
  const [first, last] = [days[0]?.day, days[days.length - 1]?.day];
  const at = pointed === null ? undefined : days[pointed];
  return (
    <figure class="plot">
      <div
        ref={box}
        role="img"
        aria-label={`Tokens by day, ${first} to ${last}, at most ${highest.toLocaleString()}`}
      />
      <figcaption>
        <span class="swatch bar-prompt" /> prompt tokens <span class="swatch bar-completion" /> answer tokens
        {at && `; ${at.day}: ${at.prompt.toLocaleString()} prompt, ${at.completion.toLocaleString()} answer`}
      </figcaption>
    </figure>
  );
}

/** Draw the days into `element`; return a function that removes the plot. */
function draw(element: HTMLElement, days: Day[], point: (day: number | null) => void): () => void {
  const colour = (name: string) => getComputedStyle(element).getPropertyValue(name);
  const axis: uPlot.Axis = {
    stroke: () => colour("--soft"),
    grid: { stroke: () => colour("--faint") },
    ticks: { stroke: () => colour("--faint") },
    font: "12px system-ui, sans-serif",
  };
  const bar = { paths: uPlot.paths.bars?.({ size: [0.8, 60] }), points: { show: false }, width: 0 } as uPlot.Series;
  const options: uPlot.Options = {
    width: element.clientWidth,
    height: HEIGHT,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"), // days are days of UTC
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: {
      x: { range: (_, low, high) => [low - DAY / 2, high + DAY / 2] },
      y: { range: (_, __, high) => [0, Math.max(1, high)] },
    },
    axes: [
      {
        ...axis,
        incrs: [1, 7, 30, 90, 365].map((days) => days * DAY),
        values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toISOString().slice(5, 10)),
      },
      { ...axis, size: 70, incrs: WHOLE, values: (_, ticks) => ticks.map((tick) => tick.toLocaleString()) },
    ],
    // the bars of prompts stand before those of the sums
    series: [{}, { ...bar, fill: () => colour("--completion") }, { ...bar, fill: () => colour("--prompt") }],
    hooks: { setCursor: [(plot) => point(plot.cursor.idx ?? null)] },
  };
  const times = days.map((one) => Date.parse(one.day) / 1000);
  const sums = days.map((one) => one.prompt + one.completion);
  const plot = new uPlot(options, [times, sums, days.map((one) => one.prompt)], element);
  const resized = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
  resized.observe(element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => plot.redraw();
  scheme.addEventListener("change", redraw);
  return () => {
    scheme.removeEventListener("change", redraw);
    resized.disconnect();
    plot.destroy();
  };
}

/** Return one entry for each day from `start` (or the first found) to today: a day without use is a gap in the plot. */
export function everyDay(found: Day[], start: string): Day[] {
  const byDay = new Map<string, Day>();
  for (const { day, prompt, completion } of found) {
    const sum = byDay.get(day) ?? { day, prompt: 0, completion: 0 };
    byDay.set(day, { day, prompt: sum.prompt + prompt, completion: sum.completion + completion });
  }
  const first = start || [...byDay.keys()].sort()[0];
  if (first === undefined) return [];
  const days: Day[] = [];
  for (let time = Date.parse(first); time <= Date.now(); time += DAY_MS) {
    const day = new Date(time).toISOString().slice(0, 10);
    days.push(byDay.get(day) ?? { day, prompt: 0, completion: 0 });
  }
  return days;
}
