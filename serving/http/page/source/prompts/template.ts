/** Prompts of MLflow's registry as templates: their variables, and their way to and from a conversation. */

import { signal } from "@preact/signals";

import type { PromptDetails, PromptMessage } from "../api_types";
import {
  type Answer,
  type Column,
  type Turn,
  composed,
  current,
  emptyAnswer,
  emptyChoice,
  newConversation,
  update,
} from "../playground/conversation";

/** A prompt that is being edited. `version` is the one that was loaded, null for a new prompt. */
export interface Draft {
  name: string;
  version: number | null;
  template: string | PromptMessage[];
  schema: string; // JSON
  settings: Record<string, unknown>; // MLflow's model_config
}

export const EMPTY: Draft = { name: "", version: null, template: "", schema: "", settings: {} };
export const draft = signal<Draft>(EMPTY);

const VARIABLE = /\{\{\s*([a-zA-Z_][a-zA-Z0-9_]*(?:\.[a-zA-Z_][a-zA-Z0-9_]*)*)\s*\}\}/g; // as MLflow has it
const BLOCK = /\{%.*?%\}/s; // of a Jinja2 template, which MLflow renders and the page does not

export function draftOf(found: PromptDetails): Draft {
  return {
    name: found.name,
    version: found.version,
    template: found.template,
    schema: found.response_format === null ? "" : JSON.stringify(found.response_format, null, 2),
    settings: found.model_config ?? {},
  };
}

function textsOf(template: Draft["template"]): string[] {
  return typeof template === "string" ? [template] : template.map((one) => one.content);
}

export function variablesOf(template: Draft["template"]): string[] {
  return [...new Set(textsOf(template).flatMap((text) => [...text.matchAll(VARIABLE)].map(([, name]) => name as string)))];
}

export function hasBlocks(template: Draft["template"]): boolean {
  return textsOf(template).some((text) => BLOCK.test(text));
}

function filled(text: string, values: Record<string, string>): string {
  return text.replace(VARIABLE, (_, name: string) => values[name] ?? "");
}

/** Begin a conversation with a prompt: its last user message is written into the box. Throws for one that is none. */
export function begin({ template, schema, settings }: Draft, values: Record<string, string>): void {
  const { columns, task } = current.value;
  const changed = columns.map((one) => withSettings(one, settings));
  const messages = typeof template === "string" ? [{ role: "user", content: template }] : template;
  const said = messages.map((one) => ({ ...one, content: filled(one.content, values) }));
  const system = said.filter((one) => one.role === "system").map((one) => one.content);
  const rest = said.filter((one) => one.role !== "system");
  const last = rest[rest.length - 1];
  const turns = turnsOf(last?.role === "user" ? rest.slice(0, -1) : rest, changed);
  const about = { task: typeof template === "string" ? task : ("chat" as const), system: system.join("\n\n"), schema, columns: changed };
  current.value = newConversation({ ...current.value, ...about });
  if (turns.length) update({ turns });
  composed.value = last?.role === "user" ? last.content : "";
}

function turnsOf(messages: PromptMessage[], columns: Column[]): Turn[] {
  const turns: Turn[] = [];
  for (let place = 0; place < messages.length; place += 2) {
    const [user, assistant] = messages.slice(place, place + 2);
    if (user?.role !== "user" || assistant?.role !== "assistant") {
      throw new Error("Its messages are no conversation: users and assistants have to take turns, the user first.");
    }
    const choices = [{ ...emptyChoice(), text: assistant.content }];
    const given = (model: string): Answer => ({ ...emptyAnswer(model), state: "done", choices });
    turns.push({ user: user.content, images: [], answers: columns.map((one) => [signal(given(one.model))]) });
  }
  return turns;
}

const SETTINGS: Record<string, keyof Column> = { temperature: "temperature", top_p: "topP", max_tokens: "maxTokens" };

function withSettings(column: Column, settings: Draft["settings"]): Column {
  const changed = { ...column };
  for (const [name, field] of Object.entries(SETTINGS)) {
    if (typeof settings[name] === "number") changed[field] = String(settings[name]);
  }
  if (Array.isArray(settings["stop_sequences"])) changed.stop = settings["stop_sequences"].join("\n");
  return changed;
}

/** Return the conversation as a prompt: its system prompt, its messages with the first column's answers, the box. */
export function fromConversation(name: string): Draft {
  const { task, system, schema, turns, columns } = current.value;
  const next = composed.value.trim() ? [{ role: "user", content: composed.value }] : [];
  if (task === "completions") return { ...EMPTY, name, template: composed.value || (turns[turns.length - 1]?.user ?? "") };
  const before = system.trim() ? [{ role: "system", content: system }] : [];
  const said = turns.flatMap((turn, place) => {
    const answer = turn.answers[0]?.[0]?.peek();
    const text = answer?.choices[answer.chosen]?.text;
    const isEnd = place === turns.length - 1 && !next.length; // a prompt ends with what the user asks
    return [{ role: "user", content: turn.user }, ...(text && !isEnd ? [{ role: "assistant", content: text }] : [])];
  });
  const settings = columns[0] === undefined ? {} : settingsOf(columns[0]);
  return { name, version: null, template: [...before, ...said, ...next], schema, settings };
}

function settingsOf(column: Column): Draft["settings"] {
  const set = Object.entries(SETTINGS).filter(([, field]) => column[field].trim());
  const settings: Draft["settings"] = Object.fromEntries(set.map(([name, field]) => [name, Number(column[field])]));
  const stops = column.stop.split("\n").filter(Boolean);
  if (stops.length) settings["stop_sequences"] = stops;
  return settings;
}
