/** The engines of each served model: replicas, batch, queue, KV cache, prefix hits, tokens/s, starts. */

import { useEffect, useRef, useState } from "preact/hooks";

import { messageOf } from "../api";
import type { EndpointHealth, EntityHealth } from "../api_types";
import { Table } from "../loading";
import { type EntityMetrics, type Sample, sampleMetrics } from "./metrics";

const HEAD = [
  "Endpoint",
  "Served model",
  "State",
  "Replicas",
  "Batch",
  "Queue",
  "KV cache",
  "Prefix hits",
  "Tokens/s",
  "Memory",
  "Cold start",
  "Kernels",
];

interface Samples {
  now: Map<string, Sample>;
  before: Map<string, Sample>;
}

/** Sample the metrics of each endpoint whenever `time` changes. */
function useSamples(endpoints: string[], time: number): { samples: Samples; error: string } {
  const [samples, set] = useState<Samples>({ now: new Map(), before: new Map() });
  const [error, setError] = useState("");
  const newest = useRef(0);
  const names = endpoints.join("\n");
  useEffect(() => {
    const mine = ++newest.current;
    Promise.all(endpoints.map(async (name) => [name, await sampleMetrics(name)] as const)).then(
      (found) => {
        if (mine !== newest.current) return;
        set(({ now }) => ({ now: new Map(found), before: now }));
        setError("");
      },
      (problem: unknown) => mine === newest.current && setError(messageOf(problem)),
    );
  }, [names, time]);
  return { samples, error };
}

export function Engines({ found, time }: { found: Record<string, EndpointHealth>; time: number }) {
  const rows = Object.entries(found).flatMap(([endpoint, state]) => {
    const answering = Object.entries(state.entities ?? { "": state });
    const shadows = Object.entries(state.shadows ?? {});
    return [
      ...answering.map(([entity, one]) => ({ endpoint, entity, state: one, isShadow: false })),
      ...shadows.map(([entity, one]) => ({ endpoint, entity, state: one, isShadow: true })),
    ];
  });
  const { samples, error } = useSamples(Object.keys(found), time);
  if (!rows.length) return <p class="note">The key sees no engines.</p>;
  return (
    <>
      {error && <p class="error">{error}</p>}
      <Table caption="Engines" head={HEAD}>
        {rows.map((row) => (
          <EngineRow key={`${row.endpoint} ${row.entity}`} {...row} samples={samples} />
        ))}
      </Table>
      <p class="note">
        Batch, queue and KV cache are sums over the replicas. Tokens/s are those between this and the last refresh. Cold start
        is how long the last start took, up to its first token.
      </p>
    </>
  );
}

interface RowProps {
  endpoint: string;
  entity: string;
  state: EntityHealth;
  isShadow: boolean;
  samples: Samples;
}

function EngineRow({ endpoint, entity, state, isShadow, samples }: RowProps) {
  const [now, before] = [samples.now.get(endpoint), samples.before.get(endpoint)];
  const name = entity || ([...(now?.metrics.keys() ?? [])].find((one) => one) ?? "");
  const metrics: EntityMetrics = now?.metrics.get(name) ?? {};
  const number = (key: string) => metrics[key]?.toLocaleString() ?? "–";
  return (
    <tr>
      <th scope="row" dir="auto">
        {endpoint}
      </th>
      <td dir="auto">
        {name || "–"}
        {isShadow && " (shadow)"}
      </td>
      <td>
        {state.unloaded ? `unloaded: ${state.unloaded}` : state.status}
        {state.standbys !== undefined && `, ${state.standbys} standby`}
      </td>
      <td>{number("replicas")}</td>
      <td>{state.running ?? "–"}</td>
      <td>
        {state.waiting ?? "–"}
        {Boolean(metrics["waiting_tenants"]) && ` of ${number("waiting_tenants")} tenants`}
      </td>
      <td>{ratio(metrics["kv_tokens_used"], metrics["kv_tokens_total"])}</td>
      <td>{ratio(metrics["prefix_hit_tokens_total"], metrics["prefix_query_tokens_total"])}</td>
      <td>{speed(name, now, before)}</td>
      <td class="short">{metrics["engine_memory_bytes"] ? `${(metrics["engine_memory_bytes"] / 2 ** 20).toFixed(0)} MiB` : "–"}</td>
      <td>{metrics["engine_start_seconds"] ? `${metrics["engine_start_seconds"].toFixed(1)} s` : "not known yet"}</td>
      <td>
        {state.kernels ?? "–"}
        {state.quantization && `, ${state.quantization}`}
      </td>
    </tr>
  );
}

function ratio(part: number | undefined, whole: number | undefined): string {
  return part === undefined || !whole ? "–" : `${((100 * part) / whole).toFixed(0)} %`;
}

function speed(name: string, now: Sample | undefined, before: Sample | undefined): string {
  const counts = [now, before].map((one) => one?.metrics.get(name)?.["generated_tokens_total"]);
  const [last, first] = counts;
  if (now === undefined || before === undefined || last === undefined || first === undefined || last < first) return "–";
  return (((last - first) * 1000) / Math.max(1, now.at - before.at)).toFixed(1);
}
