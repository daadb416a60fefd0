/** Conversations: what the playground shows, and what the browser keeps and exports. */

import { type Signal, effect, signal } from "@preact/signals";

import { say } from "../status";

export interface TokenView {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

export interface Answer {
  model: string;
  state: "running" | "done" | "stopped" | "failed";
  text: string;
  reasoning: string;
  tokens: TokenView[];
  error: string;
  finishReason: string;
  promptTokens: number | null;
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
  stop: string; // one stop sequence a line
}

export interface Turn {
  user: string;
  answers: Signal<Answer>[]; // one for each column; a signal each, so that a token renders one answer only
}

export interface Conversation {
  id: string;
  system: string;
  logprobs: boolean;
  columns: Column[];
  turns: Turn[];
}

export const MAX_COLUMNS = 4;
const STORED = `mlflow-llm ${location.pathname} conversations`;
const MAX_KEPT = 50;

interface StoredConversation extends Omit<Conversation, "turns"> {
  turns: { user: string; answers: Answer[] }[];
}

export function newColumn(model = ""): Column {
  return { model, temperature: "", topP: "", maxTokens: "256", seed: "", stop: "" };
}

export function newConversation(columns: Column[] = [newColumn()], system = "", logprobs = false): Conversation {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), system, logprobs, columns, turns: [] };
}

export function plain(conversation: Conversation): StoredConversation {
  const turns = conversation.turns.map((turn) => ({ user: turn.user, answers: turn.answers.map((one) => one.peek()) }));
  return { ...conversation, turns };
}

function live(stored: StoredConversation): Conversation {
  const turns = stored.turns.map((turn) => ({
    user: turn.user,
    answers: turn.answers.map((one) => signal<Answer>(one.state === "running" ? { ...one, state: "stopped" } : one)),
  }));
  return { ...stored, turns };
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
    return (stored as StoredConversation[]).map(live);
  } catch {
    return []; // storage is blocked, or holds what another version wrote
  }
}

/** The kept conversations, the newest first. */
export const kept = signal<Conversation[]>(load());
export const current = signal<Conversation>(newConversation());
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

export function forget(id: string): void {
  kept.value = kept.value.filter((one) => one.id !== id);
  if (current.value.id === id) {
    const { columns, system, logprobs } = current.value;
    current.value = newConversation(columns, system, logprobs);
  }
  say("The conversation is deleted.");
}
