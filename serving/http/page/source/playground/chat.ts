/** Run one answer: the request of a column, its stream, its times. */

import { type Signal, signal } from "@preact/signals";

import { apiKey, call, messageOf, noteLimits, serverSentEvents } from "../api";
import { say } from "../status";
import { type Answer, type Column, type Conversation, type TokenView, current, save, update } from "./conversation";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

/** Fields of a request to `v1/chat/completions`; what a column leaves empty is absent. */
export type ChatRequest = { model: string; messages: Message[] } & Record<string, unknown>;

interface LogprobEntry {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

interface Chunk {
  choices?: {
    delta?: { content?: string | null; reasoning_content?: string | null };
    logprobs?: { content?: LogprobEntry[] | null } | null;
    finish_reason?: string | null;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: { message?: string };
}

const aborts = new Map<Signal<Answer>, AbortController>();
export const numRunning = signal(0);

/** Return the request that answers turn `index` in a column. */
export function chatRequest(conversation: Conversation, column: number, index: number): ChatRequest {
  const settings = conversation.columns[column] as Column;
  const messages: Message[] = [];
  if (conversation.system.trim()) messages.push({ role: "system", content: conversation.system });
  conversation.turns.slice(0, index + 1).forEach((turn, place) => {
    messages.push({ role: "user", content: turn.user });
    const text = turn.answers[column]?.value.text;
    if (place < index && text) messages.push({ role: "assistant", content: text });
  });
  const request: ChatRequest = { model: settings.model, messages };
  const numbers = { temperature: settings.temperature, top_p: settings.topP, max_tokens: settings.maxTokens };
  for (const [name, text] of Object.entries({ ...numbers, seed: settings.seed })) {
    if (text.trim()) request[name] = Number(text);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) request["stop"] = stops;
  if (conversation.logprobs) Object.assign(request, { logprobs: true, top_logprobs: 5 });
  return request;
}

function emptyAnswer(model: string): Answer {
  return {
    model,
    state: "running",
    text: "",
    reasoning: "",
    tokens: [],
    error: "",
    finishReason: "",
    promptTokens: null,
    completionTokens: null,
    firstTokenMs: null,
    totalMs: null,
  };
}

/** Add a turn with the user's text and answer it in every column. */
export function ask(text: string): void {
  const answers = current.value.columns.map((column) => signal(emptyAnswer(column.model)));
  update({ turns: [...current.value.turns, { user: text, answers }] });
  const conversation = current.value;
  say(answers.length > 1 ? `${answers.length} answers have begun.` : "The answer has begun.");
  answers.forEach((answer, column) => void run(conversation, column, conversation.turns.length - 1, answer));
}

/** Answer the last turn of one column again. */
export function regenerate(column: number): void {
  const turns = [...current.value.turns];
  const last = turns.pop();
  if (last === undefined) return;
  const answer = signal(emptyAnswer(current.value.columns[column]?.model ?? ""));
  const answers = [...last.answers];
  answers[column] = answer;
  update({ turns: [...turns, { ...last, answers }] });
  say("The answer has begun.");
  void run(current.value, column, turns.length, answer);
}

export function stop(answer?: Signal<Answer>): void {
  if (answer !== undefined) aborts.get(answer)?.abort();
  else for (const abort of aborts.values()) abort.abort();
}

async function run(conversation: Conversation, column: number, index: number, answer: Signal<Answer>): Promise<void> {
  const abort = new AbortController();
  aborts.set(answer, abort);
  numRunning.value = aborts.size;
  const began = performance.now();
  const now = { ...answer.value };
  let frame = 0;
  const show = () => {
    frame = 0;
    answer.value = { ...now, tokens: [...now.tokens] };
  };
  try {
    const body = { ...chatRequest(conversation, column, index), stream: true, stream_options: { include_usage: true } };
    const response = await call("v1/chat/completions", { method: "POST", body, signal: abort.signal });
    noteLimits(response.headers);
    for await (const data of serverSentEvents(response)) {
      if (data === "[DONE]") break;
      take(now, JSON.parse(data) as Chunk, performance.now() - began);
      frame ||= requestAnimationFrame(show); // at most one render a frame, however fast the tokens come
    }
    now.state = "done";
  } catch (error) {
    now.state = abort.signal.aborted ? "stopped" : "failed";
    if (now.state === "failed") now.error = messageOf(error);
  }
  cancelAnimationFrame(frame);
  now.totalMs = performance.now() - began;
  show();
  aborts.delete(answer);
  numRunning.value = aborts.size;
  save();
  say(ending(now));
}

function take(answer: Answer, chunk: Chunk, sinceBegin: number): void {
  if (chunk.error !== undefined) throw new Error(chunk.error.message ?? "The server ended the answer with an error.");
  const choice = chunk.choices?.[0];
  const content = choice?.delta?.content ?? "";
  const reasoning = choice?.delta?.reasoning_content ?? "";
  if ((content || reasoning) && answer.firstTokenMs === null) answer.firstTokenMs = sinceBegin;
  answer.text += content;
  answer.reasoning += reasoning;
  for (const entry of choice?.logprobs?.content ?? []) answer.tokens.push(tokenView(entry));
  if (choice?.finish_reason) answer.finishReason = choice.finish_reason;
  if (chunk.usage) {
    answer.promptTokens = chunk.usage.prompt_tokens;
    answer.completionTokens = chunk.usage.completion_tokens;
  }
}

function tokenView(entry: LogprobEntry): TokenView {
  const top = entry.top_logprobs.map((one) => ({ text: one.token, logprob: one.logprob }));
  return { text: entry.token, logprob: entry.logprob, top };
}

function ending(answer: Answer): string {
  if (answer.state === "failed") return `The answer of ${answer.model} failed: ${answer.error}`;
  if (answer.state === "stopped") return `The answer of ${answer.model} is stopped.`;
  return `The answer of ${answer.model} is complete: ${answer.completionTokens ?? 0} tokens.`;
}

/** Tokens a second after the first one; null if there are too few to say. */
export function tokensPerSecond(answer: Answer): number | null {
  const { completionTokens, firstTokenMs, totalMs } = answer;
  if (completionTokens === null || completionTokens < 2 || firstTokenMs === null || totalMs === null) return null;
  const seconds = (totalMs - firstTokenMs) / 1000;
  return seconds > 0 ? (completionTokens - 1) / seconds : null;
}

export function hasKey(): boolean {
  return apiKey.value !== "";
}
