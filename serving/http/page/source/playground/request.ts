/** The request that answers a turn: its route and its fields, as they are sent and shown as code. */

import { fittingTemperature } from "../models";
import type { Answer, Choice, Column, Conversation } from "./conversation";

export type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

export interface SentCall {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string | Part[] | null;
  tool_calls?: SentCall[];
  tool_call_id?: string;
}

/** Fields that chats and completions share; what a column leaves empty is absent. */
export interface Fields {
  model: string;
  temperature?: number;
  top_p?: number;
  max_tokens?: number;
  seed?: number;
  n?: number;
  stop?: string[];
}

export interface ChatBody extends Fields {
  messages: Message[];
  tools?: unknown[];
  tool_choice?: "required" | "none";
  response_format?: unknown;
  logprobs?: true;
  top_logprobs?: number;
}

export interface CompletionBody extends Fields {
  prompt: string;
  logprobs?: number;
}

export type TaskRequest = { task: "chat"; body: ChatBody } | { task: "completions"; body: CompletionBody };

export const ROUTES = { chat: "v1/chat/completions", completions: "v1/completions" } as const;
const TOP_LOGPROBS = 5;

/** Return the request for step `step` of turn `index` in a column. Throws if the tools or the schema are not JSON. */
export function requestFor(conversation: Conversation, column: number, index: number, step: number): TaskRequest {
  const settings = conversation.columns[column] as Column;
  const fields = fieldsOf(settings);
  if (conversation.task === "completions") {
    const body: CompletionBody = { ...fields, prompt: conversation.turns[index]?.user ?? "" };
    if (conversation.logprobs) body.logprobs = TOP_LOGPROBS;
    return { task: "completions", body };
  }
  const body: ChatBody = { ...fields, messages: messagesFor(conversation, column, index, step) };
  const tools = parsed("Tools", conversation.tools);
  if (tools !== undefined) body.tools = (Array.isArray(tools) ? tools : [tools]).map(asTool);
  const { toolChoice } = conversation;
  // after a call's result the model may answer
  if (tools !== undefined && toolChoice !== "auto" && step === 0) body.tool_choice = toolChoice;
  const schema = parsed("JSON schema", conversation.schema);
  if (schema !== undefined) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (conversation.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return { task: "chat", body };
}

function fieldsOf(settings: Column): Fields {
  const fields: Fields = { model: settings.model };
  const numbers = { temperature: settings.temperature, top_p: settings.topP, max_tokens: settings.maxTokens };
  for (const [name, text] of Object.entries({ ...numbers, seed: settings.seed, n: settings.n })) {
    if (text.trim()) Object.assign(fields, { [name]: Number(text) });
  }
  const fitting = fittingTemperature(settings.model);
  if (fields.temperature === undefined && fitting !== null) fields.temperature = fitting;
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  return fields;
}

export function parsed(what: string, json: string): unknown {
  if (!json.trim()) return undefined;
  try {
    return JSON.parse(json) as unknown;
  } catch (error) {
    throw new Error(`${what}: not JSON (${error instanceof Error ? error.message : String(error)}).`);
  }
}

/** Accept a bare function as a tool too. */
function asTool(tool: unknown): unknown {
  const bare = typeof tool === "object" && tool !== null && "name" in tool && !("type" in tool);
  return bare ? { type: "function", function: tool } : tool;
}

function messagesFor(conversation: Conversation, column: number, index: number, step: number): Message[] {
  const messages: Message[] = [];
  if (conversation.system.trim()) messages.push({ role: "system", content: conversation.system });
  conversation.turns.slice(0, index + 1).forEach((turn, place) => {
    messages.push({ role: "user", content: turn.images.length ? withImages(turn.user, turn.images) : turn.user });
    const steps = (turn.answers[column] ?? []).slice(0, place < index ? undefined : step);
    for (const answer of steps) messages.push(...said(answer.value));
  });
  return messages;
}

function withImages(text: string, images: string[]): Part[] {
  const parts: Part[] = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function said(answer: Answer): Message[] {
  const choice = answer.choices[answer.chosen];
  if (choice === undefined || !(choice.text || choice.calls.length)) return [];
  if (!choice.calls.length) return [{ role: "assistant", content: choice.text }];
  const results = choice.calls.map((call): Message => ({ role: "tool", tool_call_id: call.id, content: call.result }));
  return [{ role: "assistant", content: choice.text || null, tool_calls: sentCalls(choice) }, ...results];
}

function sentCalls(choice: Choice): SentCall[] {
  return choice.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
}
