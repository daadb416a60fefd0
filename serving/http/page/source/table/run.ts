/** A table run: one chat for each row of a CSV file, a few at a time; it can be stopped and goes on where it was. */

import { signal } from "@preact/signals";

import { call, messageOf } from "../api";
import { loadAccount } from "../account";
import { say } from "../status";

export interface RowAnswer {
  text: string;
  error: string;
  promptTokens: number;
  completionTokens: number;
}

export interface Table {
  name: string;
  head: string[];
  rows: string[][];
}

export interface RunSettings {
  model: string;
  template: string;
  system: string;
  maxTokens: string;
  temperature: string;
}

const PARALLEL = 4;

export const table = signal<Table | null>(null);
export const answers = signal<Map<number, RowAnswer>>(new Map());
export const runs = signal(false);
let abort = new AbortController();

export function open(next: Table): void {
  stop();
  table.value = next;
  answers.value = new Map();
}

/** Return the template's text for a row; `{name}` is the column `name`. Throws for a name that is no column. */
export function filled(template: string, head: string[], row: string[]): string {
  return template.replace(/\{([^{}]+)\}/g, (_, name: string) => {
    const place = head.indexOf(name.trim());
    if (place < 0) throw new Error(`{${name}}: the table has no such column; it has ${head.join(", ")}.`);
    return row[place] ?? "";
  });
}

export function stop(): void {
  abort.abort();
}

/** Answer the rows that have no answer yet; rows that failed are tried again. */
export async function run(settings: RunSettings): Promise<void> {
  const from = table.value;
  if (from === null || runs.value) return;
  filled(settings.template, from.head, []); // an unknown column is refused before anything is sent
  const waiting = from.rows.map((_, place) => place).filter((place) => answers.value.get(place)?.error !== "");
  abort = new AbortController();
  const { signal: stopped } = abort;
  runs.value = true;
  say(`${waiting.length} rows are being answered.`);
  const worker = async () => {
    for (let place = waiting.shift(); place !== undefined && !stopped.aborted; place = waiting.shift()) {
      const answer = await answerRow(settings, from, place, stopped);
      if (answer !== null) answers.value = new Map(answers.value).set(place, answer);
    }
  };
  await Promise.all(Array.from({ length: PARALLEL }, worker));
  runs.value = false;
  say(stopped.aborted ? "The run is stopped." : "All rows are answered.");
  void loadAccount();
}

async function answerRow(settings: RunSettings, from: Table, place: number, stopped: AbortSignal): Promise<RowAnswer | null> {
  const user = filled(settings.template, from.head, from.rows[place] ?? []);
  const body: Record<string, unknown> = { model: settings.model, messages: [{ role: "user", content: user }] };
  if (settings.system.trim()) body["messages"] = [{ role: "system", content: settings.system }, { role: "user", content: user }];
  if (settings.maxTokens.trim()) body["max_tokens"] = Number(settings.maxTokens);
  if (settings.temperature.trim()) body["temperature"] = Number(settings.temperature);
  try {
    const response = await call("v1/chat/completions", { method: "POST", body, signal: stopped });
    const reply = (await response.json()) as {
      choices: { message: { content: string | null } }[];
      usage: { prompt_tokens: number; completion_tokens: number };
    };
    const { prompt_tokens: promptTokens, completion_tokens: completionTokens } = reply.usage;
    return { text: reply.choices[0]?.message.content ?? "", error: "", promptTokens, completionTokens };
  } catch (error) {
    if (stopped.aborted) return null; // it is answered when the run goes on
    return { text: "", error: messageOf(error), promptTokens: 0, completionTokens: 0 };
  }
}
