/** A plot of tokens by day, as stacked bars. The table below it has the same numbers. */

export interface Day {
  day: string;
  prompt: number;
  completion: number;
}

export const DAY_MS = 86_400_000;

export function Plot({ days }: { days: Day[] }) {
  const most = Math.max(1, ...days.map((one) => one.prompt + one.completion));
  const [first, last] = [days[0]?.day, days[days.length - 1]?.day];
  const label = `Tokens by day, ${first} to ${last}, at most ${most.toLocaleString()}`;
  return (
    <figure class="plot">
      <svg viewBox={`0 0 ${days.length} ${most}`} preserveAspectRatio="none" role="img" aria-label={label}>
        {days.map(({ day, prompt, completion }, index) => (
          <g key={day}>
            <title>{`${day}: ${prompt.toLocaleString()} prompt, ${completion.toLocaleString()} answer tokens`}</title>
            <rect class="bar-prompt" x={index + 0.1} width={0.8} y={most - prompt} height={prompt} />
            <rect class="bar-completion" x={index + 0.1} width={0.8} y={most - prompt - completion} height={completion} />
          </g>
        ))}
      </svg>
      <div class="days" aria-hidden="true">
        <span>{first}</span>
        <span>{last}</span>
      </div>
      <figcaption>
        <span class="swatch bar-prompt" /> prompt tokens <span class="swatch bar-completion" /> answer tokens; the tallest
        bar is {most.toLocaleString()}
      </figcaption>
    </figure>
  );
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
