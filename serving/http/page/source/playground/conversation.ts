/** Conversations: what the playground shows, and what the browser keeps, exports and imports. */

import { type Signal, effect, signal } from "@preact/signals";

import { say } from "../status";

export interface TokenView {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
  result: string; // what the user entered
}

/** One of the `n` texts of an answer. */
export interface Choice {
  text: string;
  reasoning: string;
  tokens: TokenView[];
  calls: ToolCall[];
  finishReason: string;
}

export interface Answer {
  model: string;
  servedModel: string;
  state: "running" | "done" | "stopped" | "failed";
  choices: Choice[];
  chosen: number; // the choice with which the conversation goes on
  seed: number | null;
  error: string;
  promptTokens: number | null;
  cachedTokens: number;
  completionTokens: number | null;
  firstTokenMs: number | null;
  totalMs: number | null;
}

/** Settings of a column. Empty text leaves a field to the model's own default. */
export interface Column {
  model: string;
  temperature: string;
  topP: string;
  maxTokens: string;
  seed: string;
  n: string;
  stop: string; // one stop sequence a line
}

/** A message, and for each column its answers: one, and one more after each round of tool results. */
export interface Turn {
  user: string;
  images: string[]; // data URLs
  answers: Signal<Answer>[][]; // a signal each, so that a token renders one answer only
}

export type ToolChoice = "auto" | "required" | "none";

export interface Conversation {
  id: string;
  task: "chat" | "completions";
  system: string;
  tools: string; // JSON
  toolChoice: ToolChoice;
  schema: string; // JSON
  logprobs: boolean;
  columns: Column[];
  turns: Turn[];
}

export const MAX_COLUMNS = 4;
const STORED = `mlflow-llm ${location.pathname} conversations`;
const MAX_KEPT = 50;

interface StoredConversation extends Omit<Conversation, "turns"> {
  turns: { user: string; images: string[]; answers: Answer[][] }[];
}

export function newColumn(model = ""): Column {
  return { model, temperature: "", topP: "", maxTokens: "256", seed: "", n: "", stop: "" };
}

/** Begin a conversation with the settings of `like`. */
export function newConversation(like: Partial<Conversation> = {}): Conversation {
  return {
    task: "chat",
    system: "",
    tools: "",
    toolChoice: "auto",
    schema: "",
    logprobs: false,
    columns: [newColumn()],
    ...like,
    id: crypto.getRandomValues(new Uint32Array(2)).join("-"),
    turns: [],
  };
}

export function emptyChoice(): Choice {
  return { text: "", reasoning: "", tokens: [], calls: [], finishReason: "" };
}

export function emptyAnswer(model: string): Answer {
  return {
    model,
    servedModel: "",
    state: "running",
    choices: [],
    chosen: 0,
    seed: null,
    error: "",
    promptTokens: null,
    cachedTokens: 0,
    completionTokens: null,
    firstTokenMs: null,
    totalMs: null,
  };
}

export function plain(conversation: Conversation): StoredConversation {
  const turns = conversation.turns.map((turn) => ({
    ...turn,
    answers: turn.answers.map((steps) => steps.map((one) => one.peek())),
  }));
  return { ...conversation, turns };
}

function live(stored: StoredConversation): Conversation {
  const turns = stored.turns.map((turn) => ({
    ...turn,
    answers: turn.answers.map((steps) =>
      steps.map((one) => signal<Answer>(one.state === "running" ? { ...one, state: "stopped" } : one)),
    ),
  }));
  return { ...stored, turns };
}

type Shape = Record<string, unknown>;

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function number(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function list(value: unknown): Shape[] {
  return Array.isArray(value) ? value.filter((one): one is Shape => typeof one === "object" && one !== null) : [];
}

/** Read a conversation that this page, an earlier version of it, or anybody has written. Throws if it is none. */
function checked(given: unknown): StoredConversation {
  const from = given as Shape;
  if (typeof given !== "object" || given === null || !Array.isArray(from["turns"])) {
    throw new Error("This is no conversation that the page has exported.");
  }
  const columns = list(from["columns"]).slice(0, MAX_COLUMNS).map(checkedColumn);
  const turns = list(from["turns"]).map((turn) => ({
    user: text(turn["user"]),
    images: (Array.isArray(turn["images"]) ? turn["images"] : []).map(text).filter((one) => one.startsWith("data:image/")),
    answers: (Array.isArray(turn["answers"]) ? turn["answers"] : [])
      .slice(0, MAX_COLUMNS)
      .map((steps) => (Array.isArray(steps) ? list(steps) : list([steps])).map(checkedAnswer)),
  }));
  return {
    id: text(from["id"]) || newConversation().id,
    task: from["task"] === "completions" ? "completions" : "chat",
    system: text(from["system"]),
    tools: text(from["tools"]),
    toolChoice: from["toolChoice"] === "required" || from["toolChoice"] === "none" ? from["toolChoice"] : "auto",
    schema: text(from["schema"]),
    logprobs: from["logprobs"] === true,
    columns: columns.length ? columns : [newColumn()],
    turns,
  };
}

function checkedColumn(from: Shape): Column {
  const column = newColumn();
  for (const name of Object.keys(column) as (keyof Column)[]) column[name] = text(from[name]);
  return column;
}

function checkedAnswer(from: Shape): Answer {
  const state = text(from["state"]);
  const choices = Array.isArray(from["choices"]) ? list(from["choices"]) : [from]; // earlier versions had one choice
  const found = choices.map(checkedChoice);
  return {
    ...emptyAnswer(text(from["model"])),
    servedModel: text(from["servedModel"]),
    state: state === "done" || state === "failed" ? state : "stopped",
    choices: found,
    chosen: Math.min(Math.max(0, number(from["chosen"]) ?? 0), Math.max(0, found.length - 1)),
    seed: number(from["seed"]),
    error: text(from["error"]),
    promptTokens: number(from["promptTokens"]),
    cachedTokens: number(from["cachedTokens"]) ?? 0,
    completionTokens: number(from["completionTokens"]),
    firstTokenMs: number(from["firstTokenMs"]),
    totalMs: number(from["totalMs"]),
  };
}

function checkedChoice(from: Shape): Choice {
  const one = (value: Shape) => ({ text: text(value["text"]), logprob: number(value["logprob"]) ?? 0 });
  return {
    text: text(from["text"]),
    reasoning: text(from["reasoning"]),
    tokens: list(from["tokens"]).map((token) => ({ ...one(token), top: list(token["top"]).map(one) })),
    calls: list(from["calls"]).map((call) => ({
      id: text(call["id"]),
      name: text(call["name"]),
      arguments: text(call["arguments"]),
      result: text(call["result"]),
    })),
    finishReason: text(from["finishReason"]),
  };
}

/** Return a copy that has the turns before `end`, as a conversation of its own. */
export function branch(conversation: Conversation, end: number): Conversation {
  const stored = structuredClone(plain(conversation));
  return { ...live({ ...stored, turns: stored.turns.slice(0, end) }), id: newConversation().id };
}

export function title(conversation: Conversation): string {
  const first = conversation.turns[0]?.user.trim() ?? "";
  return first ? first.slice(0, 60) : "New conversation";
}

function load(): Conversation[] {
  try {
    const stored: unknown = JSON.parse(localStorage.getItem(STORED) ?? "[]");
    return (stored as unknown[]).map((one) => live(checked(one)));
  } catch {
    return []; // storage is blocked, or holds what is no list of conversations
  }
}

/** The kept conversations, the newest first. */
export const kept = signal<Conversation[]>(load());
export const current = signal<Conversation>(newConversation());
export const composed = signal(""); // what is written in the box for the next message
export const storageProblem = signal("");

effect(() => {
  const conversations = kept.value.slice(0, MAX_KEPT);
  try {
    localStorage.setItem(STORED, JSON.stringify(conversations.map(plain)));
    storageProblem.value = "";
  } catch {
    storageProblem.value = "The browser does not keep conversations: its storage is full or blocked. Export this one.";
  }
});

/** Replace the current conversation; one that has turns is kept in the browser. */
export function update(change: Partial<Conversation>): void {
  const changed = { ...current.value, ...change };
  current.value = changed;
  if (changed.turns.length || kept.value.some((one) => one.id === changed.id)) keep();
}

/** Move the current conversation to the front of the kept ones, as it is now. */
function keep(): void {
  const now = current.value;
  kept.value = [now, ...kept.value.filter((one) => one.id !== now.id)];
}

/** Write the kept conversations to the browser's storage again: an answer has ended. */
export function save(): void {
  kept.value = [...kept.value];
}

/** Open a conversation that was exported, as one of its own. Throws if the text is none. */
export function importConversation(json: string): void {
  let given: unknown;
  try {
    given = JSON.parse(json);
  } catch {
    throw new Error("The file is not JSON.");
  }
  current.value = { ...live(checked(given)), id: newConversation().id };
  keep();
  say("The conversation is imported.");
}

export function forget(id: string): void {
  kept.value = kept.value.filter((one) => one.id !== id);
  if (current.value.id === id) current.value = newConversation(current.value);
  say("The conversation is deleted.");
}
