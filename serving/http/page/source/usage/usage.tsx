/** What the key used: a plot and a table by day, and what is left of its limits. */

import { useState } from "preact/hooks";

import { call, limitsLeft, messageOf } from "../api";
import { download } from "../download";
import { Shown, Table, useLoaded } from "../loading";
import { say } from "../status";
import { DAY_MS, Plot, everyDay } from "./plot";

const GROUPS = { endpoint: "Endpoint", entity: "Served model", key_id: "Key", tenant: "Tenant" } as const;
type Group = keyof typeof GROUPS;
const RANGES = { "7": "7 days", "30": "30 days", "90": "90 days", "": "All time" } as const;
type Range = keyof typeof RANGES;

type Row = { day: string; requests: number; prompt_tokens: number; cached_tokens: number } & {
  completion_tokens: number;
  cost: string;
} & Partial<Record<Group, string>>;

interface Sums {
  currency: string;
  usage: Row[];
}

/** Return the first day of a range; "" for all time. */
function firstDay(range: Range): string {
  return range && new Date(Date.now() - (Number(range) - 1) * DAY_MS).toISOString().slice(0, 10);
}

export function Usage() {
  const [group, setGroup] = useState<Group>("endpoint");
  const [range, setRange] = useState<Range>("30");
  const start = firstDay(range);
  const query = start && `&start=${start}`;
  const loaded = useLoaded<Sums>(`api/2.0/usage?by=day,${group}${query}`);
  const [problem, setProblem] = useState("");
  const asCsv = async () => {
    try {
      const response = await call(`api/2.0/usage?format=csv${query}`);
      download("usage.csv", await response.blob());
      setProblem("");
      say("The CSV file is downloaded.");
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  return (
    <div class="page">
      <h1>My usage</h1>
      <div class="filters">
        <div>
          <label for="range">Time</label>
          <select id="range" value={range} onChange={(e) => setRange(e.currentTarget.value as Range)}>
            {Object.entries(RANGES).map(([value, text]) => (
              <option key={value} value={value}>
                {text}
              </option>
            ))}
          </select>
        </div>
        <div>
          <label for="group">By day and</label>
          <select id="group" value={group} onChange={(e) => setGroup(e.currentTarget.value as Group)}>
            {Object.entries(GROUPS).map(([value, text]) => (
              <option key={value} value={value}>
                {text}
              </option>
            ))}
          </select>
        </div>
        <button type="button" onClick={loaded.reload}>
          Refresh
        </button>
        <button type="button" onClick={() => void asCsv()}>
          Download CSV
        </button>
      </div>
      {problem && <p class="error">{problem}</p>}
      <Shown loaded={loaded}>{(sums) => <Found sums={sums} group={group} start={start} />}</Shown>
      <Limits />
    </div>
  );
}

function Found({ sums, group, start }: { sums: Sums; group: Group; start: string }) {
  const rows = sums.usage.filter((row) => row[group] !== undefined); // not those of the grouping before
  if (!rows.length) return <p class="note">Nothing was used in this time.</p>;
  const days = rows.map(({ day, prompt_tokens, completion_tokens }) => ({
    day,
    prompt: prompt_tokens,
    completion: completion_tokens,
  }));
  const total = (name: "requests" | "prompt_tokens" | "cached_tokens" | "completion_tokens") =>
    rows.reduce((sum, row) => sum + row[name], 0).toLocaleString();
  return (
    <>
      <Plot days={everyDay(days, start)} />
      <Table
        caption="Usage by day"
        head={["Day (UTC)", GROUPS[group], "Requests", "Prompt tokens", "of them cached", "Answer tokens", `Cost ${sums.currency}`]}
      >
        {rows.toReversed().map((row) => (
          <tr key={`${row.day} ${row[group]}`}>
            <th scope="row">{row.day}</th>
            <td dir="auto">{row[group]}</td>
            <td>{row.requests.toLocaleString()}</td>
            <td>{row.prompt_tokens.toLocaleString()}</td>
            <td>{row.cached_tokens.toLocaleString()}</td>
            <td>{row.completion_tokens.toLocaleString()}</td>
            <td>{row.cost}</td>
          </tr>
        ))}
        <tr class="total">
          <th scope="row">Total</th>
          <td />
          <td>{total("requests")}</td>
          <td>{total("prompt_tokens")}</td>
          <td>{total("cached_tokens")}</td>
          <td>{total("completion_tokens")}</td>
          <td />
        </tr>
      </Table>
    </>
  );
}

function Limits() {
  const found = Object.entries(limitsLeft.value);
  return (
    <section>
      <h2>What is left</h2>
      {found.length ? (
        <Table caption="Limits, as the last answer in this tab had them" head={["Limit on", "Allowed", "Left", "Free again in"]}>
          {found.map(([what, { limit, remaining, reset }]) => (
            <tr key={what}>
              <th scope="row">{what}</th>
              <td>{limit}</td>
              <td>{remaining}</td>
              <td>{reset}</td>
            </tr>
          ))}
        </Table>
      ) : (
        <p class="note">
          An answer says what is left of the limits that it counted against. No answer in this tab has said so yet: ask
          something in the <a href="#/playground">playground</a>.
        </p>
      )}
    </section>
  );
}
