/** A chat request as code. The key is never part of it: it comes from an environment variable. */

import type { ChatRequest } from "./chat";

export type Language = "curl" | "python";

export function code(language: Language, request: ChatRequest, base: string, withKey: boolean): string {
  return language === "curl" ? curl(request, base, withKey) : python(request, base, withKey);
}

function curl(request: ChatRequest, base: string, withKey: boolean): string {
  const lines = [`curl ${shell(`${base}v1/chat/completions`)}`, "-H 'Content-Type: application/json'"];
  if (withKey) lines.push('-H "Authorization: Bearer $MLFLOW_LLM_KEY"');
  lines.push(`-d ${shell(JSON.stringify(request, null, 2))}`);
  return lines.join(" \\\n  ");
}

function shell(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function python(request: ChatRequest, base: string, withKey: boolean): string {
  const fields = Object.entries(request).map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    ...(withKey ? ["import os", ""] : []),
    "import openai",
    "",
    `client = openai.OpenAI(base_url=${literal(`${base}v1`)}, api_key=${withKey ? 'os.environ["MLFLOW_LLM_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

/** Return a JSON value as a Python literal; a JSON string is one already. */
function literal(value: unknown): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value as object).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`);
    return `{${entries.join(", ")}}`;
  }
  return JSON.stringify(value);
}
