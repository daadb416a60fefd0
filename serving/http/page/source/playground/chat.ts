/** Run answers: the request of a column, its stream, its times. */

import { type Signal, signal } from "@preact/signals";

import { apiKey, call, messageOf, serverSentEvents } from "../api";
import { loadAccount } from "../account";
import type { ChatChunk, ChatDelta, ChatLogprobs, TextChunk, TextLogprobs } from "../api_types";
import { say } from "../status";
import {
  type Answer,
  type Choice,
  type TokenView,
  current,
  emptyAnswer,
  emptyChoice,
  save,
  update,
} from "./conversation";
import { ROUTES, type TaskRequest, requestFor } from "./request";

type Chunk = Partial<ChatChunk | TextChunk> & { error?: { message?: string } };
type StreamChoice = (ChatChunk | TextChunk)["choices"][number];
type CallDelta = NonNullable<ChatDelta["tool_calls"]>[number];

const aborts = new Map<Signal<Answer>, AbortController>();
export const numRunning = signal(0);

/** Return a seed that a request can name, so that its answer can be made again. */
function drawSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0] as number;
}

/** Add a turn with the user's text and images and answer it in every column. */
export function ask(text: string, images: string[] = []): void {
  const answers = current.value.columns.map((column) => [signal(emptyAnswer(column.model))]);
  update({ turns: [...current.value.turns, { user: text, images, answers }] });
  say(answers.length > 1 ? `${answers.length} answers have begun.` : "The answer has begun.");
  const index = current.value.turns.length - 1;
  answers.forEach(([answer], column) => answer !== undefined && void run(column, index, 0, answer, null));
}

/** Answer the last turn of one column again from its first step; with `seed`, or with another one. */
export function regenerate(column: number, seed: number | null): void {
  const index = current.value.turns.length - 1;
  if (index < 0) return;
  const answer = signal(emptyAnswer(current.value.columns[column]?.model ?? ""));
  replaceSteps(column, index, [answer]);
  say("The answer has begun.");
  void run(column, index, 0, answer, seed ?? drawSeed());
}

/** Send the results of the tool calls of a column's last answer; the model goes on from there. */
export function sendResults(column: number): void {
  const index = current.value.turns.length - 1;
  const steps = current.value.turns[index]?.answers[column];
  if (steps === undefined) return;
  const answer = signal(emptyAnswer(current.value.columns[column]?.model ?? ""));
  replaceSteps(column, index, [...steps, answer]);
  say("The answer has begun.");
  void run(column, index, steps.length, answer, null);
}

function replaceSteps(column: number, index: number, steps: Signal<Answer>[]): void {
  const turns = current.value.turns.map((turn, place) =>
    place === index ? { ...turn, answers: turn.answers.map((old, at) => (at === column ? steps : old)) } : turn,
  );
  update({ turns });
}

export function stop(answer?: Signal<Answer>): void {
  if (answer !== undefined) aborts.get(answer)?.abort();
  else for (const abort of aborts.values()) abort.abort();
}

async function run(column: number, index: number, step: number, answer: Signal<Answer>, seed: number | null): Promise<void> {
  const conversation = current.value;
  const abort = new AbortController();
  aborts.set(answer, abort);
  numRunning.value = aborts.size;
  const began = performance.now();
  const now: Answer = { ...answer.value };
  let frame = 0;
  const show = () => {
    frame = 0;
    answer.value = { ...now, choices: now.choices.map((one) => ({ ...one, tokens: [...one.tokens] })) };
  };
  try {
    const request = requestFor(conversation, column, index, step);
    request.body.seed = now.seed = seed ?? request.body.seed ?? drawSeed();
    const response = await call(ROUTES[request.task], { method: "POST", body: streamed(request), signal: abort.signal });
    now.servedModel = decodeURIComponent(response.headers.get("served-model-name") ?? "");
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
  if (!aborts.size) void loadAccount(); // what is left of the limits
}

function streamed({ body }: TaskRequest): object {
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function take(answer: Answer, chunk: Chunk, sinceBegin: number): void {
  if (chunk.error !== undefined) throw new Error(chunk.error.message ?? "The server ended the answer with an error.");
  for (const choice of chunk.choices ?? []) {
    const index = choice.index ?? 0;
    while (answer.choices.length <= index) answer.choices.push(emptyChoice());
    if (takeChoice(answer.choices[index] as Choice, choice)) answer.firstTokenMs ??= sinceBegin;
  }
  if (chunk.usage) {
    answer.promptTokens = chunk.usage.prompt_tokens;
    answer.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? answer.cachedTokens;
    answer.completionTokens = chunk.usage.completion_tokens ?? 0;
  }
}

/** Add a piece to a choice; return whether it had something to show. */
function takeChoice(choice: Choice, piece: StreamChoice): boolean {
  const delta: ChatDelta = "delta" in piece ? piece.delta : { content: piece.text };
  const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = delta;
  choice.text += content;
  choice.reasoning += reasoning;
  for (const call of calls) {
    while (choice.calls.length <= call.index) choice.calls.push({ id: "", name: "", arguments: "", result: "" });
    const known = choice.calls[call.index] as Choice["calls"][number];
    const [name, input] = calledBy(call);
    choice.calls[call.index] = {
      ...known,
      id: call.id ?? known.id,
      name: known.name + name,
      arguments: known.arguments + input,
    };
  }
  choice.tokens.push(...tokenViews(piece.logprobs));
  if (piece.finish_reason) choice.finishReason = piece.finish_reason;
  return Boolean(content || reasoning || calls.length);
}

/** Return the pieces of a call's name and of its arguments; a custom tool's are its input. */
function calledBy(call: CallDelta): [string, string] {
  return "function" in call ? [call.function.name ?? "", call.function.arguments ?? ""] : [call.custom.name ?? "", call.custom.input];
}

function tokenViews(logprobs: ChatLogprobs | TextLogprobs | null | undefined): TokenView[] {
  if (!logprobs) return [];
  if ("tokens" in logprobs) {
    return logprobs.tokens.map((text, place) => ({
      text,
      logprob: logprobs.token_logprobs[place] ?? 0,
      top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([one, logprob]) => ({ text: one, logprob: logprob ?? 0 })),
    }));
  }
  return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
    text: token,
    logprob: logprob ?? 0,
    top: top.map((one) => ({ text: one.token, logprob: one.logprob ?? 0 })),
  }));
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
