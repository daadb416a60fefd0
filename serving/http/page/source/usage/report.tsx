/** Usage by day and one more column: a plot, a table and a CSV file, as `/api/2.0/usage` has it. */

import { useState } from "preact/hooks";

import { account } from "../account";
import { call, messageOf } from "../api";
import type { Bill, UsageSumInfo } from "../api_types";
import { download } from "../download";
import { Shown, Table, useLoaded } from "../loading";
import { SHADOW, payer } from "../shadow";
import { say } from "../status";
import { DAY_MS, Plot, everyDay } from "./plot";

export const GROUPS = {
  endpoint: "Endpoint",
  entity: "Served model",
  adapter: "Adapter",
  model_version: "Model version",
  key_id: "Key",
  tenant: "Tenant",
} as const;
export type Group = keyof typeof GROUPS;
const FILTERS = ["endpoint", "adapter", "tenant", "key_id"] as const;
const RANGES = { "7": "7 days", "30": "30 days", "90": "90 days", "": "All time" } as const;
type Range = keyof typeof RANGES;

/** Return the first day of a range; "" for all time. */
function firstDay(range: Range): string {
  return range && new Date(Date.now() - (Number(range) - 1) * DAY_MS).toISOString().slice(0, 10);
}

export function UsageReport({ groups, filters = false }: { groups: Group[]; filters?: boolean }) {
  const [group, setGroup] = useState<Group>(groups[0] ?? "endpoint");
  const [range, setRange] = useState<Range>("30");
  const [only, setOnly] = useState<Record<string, string>>({});
  const [problem, setProblem] = useState("");
  const start = firstDay(range);
  const selected = new URLSearchParams(Object.entries(only).filter(([, value]) => value));
  if (start) selected.set("start", start);
  const query = selected.size ? `&${selected.toString()}` : "";
  const loaded = useLoaded<Bill>(`api/2.0/usage?by=day,${group}${query}`);
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
    <>
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
            {groups.map((value) => (
              <option key={value} value={value}>
                {GROUPS[value]}
              </option>
            ))}
          </select>
        </div>
        {filters &&
          FILTERS.map((name) => (
            <div key={name}>
              <label for={`only-${name}`}>Only {GROUPS[name].toLowerCase()}</label>
              <input
                id={`only-${name}`}
                maxLength={256}
                value={only[name] ?? ""}
                onChange={(e) => setOnly({ ...only, [name]: e.currentTarget.value.trim() })}
              />
            </div>
          ))}
        <button type="button" onClick={loaded.reload}>
          {filters ? "Refresh the usage" : "Refresh"}
        </button>
        <button type="button" onClick={() => void asCsv()}>
          Download CSV
        </button>
      </div>
      {problem && <p class="error">{problem}</p>}
      <Shown loaded={loaded}>{(sums) => <Found sums={sums} group={group} start={start} />}</Shown>
      {account.value?.scopes.includes("manage") && <Copies selected={selected} />}
    </>
  );
}

/** How much of the usage is that of copies of requests, which have a tenant of their own. */
function Copies({ selected }: { selected: URLSearchParams }) {
  const query = new URLSearchParams(selected);
  query.set("tenant", SHADOW);
  const loaded = useLoaded<Bill>(`api/2.0/usage?by=tenant&${query.toString()}`);
  const others = selected.has("tenant") && selected.get("tenant") !== SHADOW;
  const found = loaded.value?.usage[0];
  if (found === undefined || others) return null;
  const { requests, prompt_tokens: prompt, completion_tokens: completion } = found;
  return (
    <p class="note">
      Among these are {requests.toLocaleString()} copies of requests for shadows, with {prompt.toLocaleString()} prompt and{" "}
      {completion.toLocaleString()} answer tokens. They cost nothing and count towards no limit; their tenant and key is{" "}
      {SHADOW}.
    </p>
  );
}

function Found({ sums, group, start }: { sums: Bill; group: Group; start: string }) {
  const rows = sums.usage.filter((row) => row[group] !== undefined); // not those of the grouping before
  if (!rows.length) return <p class="note">Nothing was used in this time.</p>;
  const days = rows.map(({ day, prompt_tokens, completion_tokens }) => ({
    day: day ?? "", // never absent: the sums are by day
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
            <th scope="row" class="short">
              {row.day}
            </th>
            <td dir="auto">{named(row, group) || "–"}</td>
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
          <td>{totalCost(rows)}</td>
        </tr>
      </Table>
    </>
  );
}

function named(row: UsageSumInfo, group: Group): string {
  const name = row[group] ?? "";
  return group === "tenant" || group === "key_id" ? payer(name) : name;
}

/** Return the exact sum of decimal strings. */
function totalCost(rows: UsageSumInfo[]): string {
  const micro = rows.reduce((sum, { cost }) => {
    const [whole = "0", decimals = ""] = cost.split(".");
    return sum + BigInt(whole + decimals.padEnd(6, "0"));
  }, 0n);
  const text = micro.toString().padStart(7, "0");
  return `${text.slice(0, -6)}.${text.slice(-6).replace(/0{1,4}$/, "")}`;
}
