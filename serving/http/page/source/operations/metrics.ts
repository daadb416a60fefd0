/** Numbers of an endpoint's engines, from its metrics in Prometheus' text format. */

import { call } from "../api";

/** The metrics of one served model by their names, without `mlflow_llm_`. */
export type EntityMetrics = Record<string, number>;

const LINE = /^mlflow_llm_(\w+)\{(.*)\} (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the metrics by served model; those with further labels are summed. */
export function parseMetrics(text: string, endpoint: string): Map<string, EntityMetrics> {
  const found = new Map<string, EntityMetrics>();
  for (const line of text.split("\n")) {
    const [, name = "", labels = "", value = ""] = LINE.exec(line) ?? [];
    const by = Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, one]) => [key, unescape(one as string)]));
    if (by["endpoint"] !== endpoint || by["entity"] === undefined) continue;
    const metrics = found.get(by["entity"]) ?? {};
    metrics[name] = (metrics[name] ?? 0) + Number(value);
    found.set(by["entity"], metrics);
  }
  return found;
}

function unescape(value: string): string {
  return value.replace(/\\(["\\n])/g, (_, one: string) => (one === "n" ? "\n" : one));
}

export interface Sample {
  at: number;
  metrics: Map<string, EntityMetrics>;
}

export async function sampleMetrics(endpoint: string): Promise<Sample> {
  const response = await call(`api/2.0/serving-endpoints/${encodeURIComponent(endpoint)}/metrics`);
  return { at: performance.now(), metrics: parseMetrics(await response.text(), endpoint) };
}
