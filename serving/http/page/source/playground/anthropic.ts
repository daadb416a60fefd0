/** A chat in the form of Anthropic's Messages API. */

import type { ChatBody, Message, Part } from "./request";

type Block = Record<string, unknown>;

const DEFAULT_MAX_TOKENS = 256; // the API has no default of its own
const SAMPLING = ["temperature", "top_p"] as const; // that the client has no arguments for since its version 2
const READ = new Set<string>([...SAMPLING, "model", "messages", "max_tokens", "stop", "tools", "tool_choice"]);

/** Return the client's arguments, and the names of the fields that the API does not have. */
export function anthropicRequest(body: ChatBody): { fields: Record<string, unknown>; lost: string[] } {
  const fields: Record<string, unknown> = { model: body.model, max_tokens: body.max_tokens ?? DEFAULT_MAX_TOKENS };
  if (body.stop !== undefined) fields["stop_sequences"] = body.stop;
  const system = body.messages.find((one) => one.role === "system");
  if (system !== undefined) fields["system"] = system.content;
  if (body.tools !== undefined) fields["tools"] = body.tools.map(tool);
  if (body.tool_choice !== undefined) fields["tool_choice"] = { type: body.tool_choice === "none" ? "none" : "any" };
  fields["messages"] = messages(body.messages.filter((one) => one !== system));
  const sampling = SAMPLING.filter((name) => body[name] !== undefined).map((name) => [name, body[name]]);
  if (sampling.length) fields["extra_body"] = Object.fromEntries(sampling);
  return { fields, lost: Object.keys(body).filter((name) => !READ.has(name)) };
}

function tool(given: unknown): Block {
  const one = (given as { function?: Block }).function ?? {};
  const about = one["description"] === undefined ? {} : { description: one["description"] };
  return { name: one["name"], ...about, input_schema: one["parameters"] ?? { type: "object" } };
}

function messages(given: Message[]): { role: string; content: unknown }[] {
  const found: { role: string; content: unknown }[] = [];
  for (const message of given) {
    const last = found[found.length - 1];
    if (message.role === "tool") {
      const result = { type: "tool_result", tool_use_id: message.tool_call_id, content: message.content };
      // all results of a turn are in one message
      if (last?.role === "user" && Array.isArray(last.content)) last.content.push(result);
      else found.push({ role: "user", content: [result] });
    } else if (message.tool_calls !== undefined) {
      const texts = typeof message.content === "string" && message.content ? [{ type: "text", text: message.content }] : [];
      const calls = message.tool_calls.map((one) => ({
        type: "tool_use",
        id: one.id,
        name: one.function.name,
        input: JSON.parse(one.function.arguments || "{}") as unknown,
      }));
      found.push({ role: "assistant", content: [...texts, ...calls] });
    } else {
      const content = Array.isArray(message.content) ? message.content.map(part) : message.content;
      found.push({ role: message.role, content });
    }
  }
  return found;
}

function part(given: Part): Block {
  if (given.type === "text") return { type: "text", text: given.text };
  const [, kind = "", data = ""] = /^data:([^;,]+);base64,(.*)$/s.exec(given.image_url.url) ?? [];
  return { type: "image", source: { type: "base64", media_type: kind, data } };
}
