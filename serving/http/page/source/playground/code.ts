/** A request as code for several clients. The key is never part of it: it comes from an environment variable. */

import { endpointOf } from "../models";
import { anthropicRequest } from "./anthropic";
import { ROUTES, type TaskRequest } from "./request";

export const LANGUAGES = {
  curl: "curl",
  openai: "Python (openai)",
  anthropic: "Python (anthropic)",
  databricks: "Python (databricks-sdk)",
  mlflow: "Python (mlflow)",
} as const;
export type Language = keyof typeof LANGUAGES;

interface Place {
  base: string; // the page's URL, which ends in a slash
  withKey: boolean;
}

/** Return the code. A name of a client that has no such request gets a comment that says so. */
export function code(language: Language, request: TaskRequest, base: string, withKey: boolean): string {
  return WRITERS[language](request, { base, withKey });
}

const KEY = 'os.environ["MLFLOW_LLM_KEY"]';

const WRITERS: Record<Language, (request: TaskRequest, place: Place) => string> = {
  curl(request, { base, withKey }) {
    const lines = [`curl ${shell(`${base}${ROUTES[request.task]}`)}`, "-H 'Content-Type: application/json'"];
    if (withKey) lines.push('-H "Authorization: Bearer $MLFLOW_LLM_KEY"');
    lines.push(`-d ${shell(JSON.stringify(request.body, null, 2))}`);
    return lines.join(" \\\n  ");
  },
  openai(request, { base, withKey }) {
    const [method, piece] =
      request.task === "chat" ? ["chat.completions", "delta.content"] : ["completions", "text"];
    return [
      ...(withKey ? ["import os", ""] : []),
      "import openai",
      "",
      `client = openai.OpenAI(base_url=${literal(`${base}v1`)}, api_key=${withKey ? KEY : '"none"'})`,
      `stream = client.${method}.create(`,
      ...named(request.body),
      "    stream=True,",
      ")",
      "for chunk in stream:",
      "    for choice in chunk.choices:",
      `        print(choice.${piece} or "", end="", flush=True)`,
    ].join("\n");
  },
  anthropic(request, { base, withKey }) {
    if (request.task !== "chat") return "# The Anthropic API has chats only, no completions.";
    const { fields, lost } = anthropicRequest(request.body);
    return [
      ...(lost.length ? [`# The Anthropic API has no field for ${lost.join(", ")}.`] : []),
      ...(withKey ? ["import os", ""] : []),
      "import anthropic",
      "",
      `client = anthropic.Anthropic(base_url=${literal(base.replace(/\/$/, ""))}, api_key=${withKey ? KEY : '"none"'})`,
      "with client.messages.stream(",
      ...named(fields),
      ") as stream:",
      "    for text in stream.text_stream:",
      '        print(text, end="", flush=True)',
      "    for block in stream.get_final_message().content:",
      '        if block.type == "tool_use":',
      "            print(block.name, block.input)",
    ].join("\n");
  },
  databricks(request, { base, withKey }) {
    const { origin, pathname } = new URL(base);
    const path = `${pathname}serving-endpoints/${encodeURIComponent(endpointOf(request.body.model))}/invocations`;
    return [
      ...(withKey ? ["import os", ""] : []),
      "from databricks.sdk import WorkspaceClient",
      "",
      `client = WorkspaceClient(host=${literal(origin)}, token=${withKey ? KEY : '"none"'}, auth_type="pat")`,
      "reply = client.api_client.do(",
      '    "POST",',
      `    ${literal(path)},`,
      "    body={",
      ...items(request.body),
      "    },",
      ")",
      'for choice in reply["choices"]:',
      request.task === "chat" ? '    print(choice["message"])' : '    print(choice["text"])',
    ].join("\n");
  },
  mlflow(request, { base, withKey }) {
    return [
      ...(withKey ? ["# the key is read from the environment variable MLFLOW_LLM_KEY"] : []),
      "from mlflow.deployments import get_deploy_client",
      "",
      `client = get_deploy_client(${literal(`llm:${base.replace(/\/$/, "")}`)})`,
      "reply = client.predict(",
      `    endpoint=${literal(endpointOf(request.body.model))},`,
      "    inputs={",
      ...items(request.body),
      "    },",
      ")",
      'for choice in reply["choices"]:',
      request.task === "chat" ? '    print(choice["message"])' : '    print(choice["text"])',
    ].join("\n");
  },
};

function shell(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function named(fields: object): string[] {
  return Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value)},`);
}

function items(fields: object): string[] {
  return Object.entries(fields).map(([name, value]) => `        ${JSON.stringify(name)}: ${literal(value)},`);
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
