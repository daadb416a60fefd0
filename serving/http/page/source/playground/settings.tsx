/** What all columns share: task, system prompt, tools, JSON schema, token view. */

import { useMemo, useState } from "preact/hooks";

import { messageOf } from "../api";
import { type Conversation, type ToolChoice, current, newConversation, update } from "./conversation";
import { parsed } from "./request";

const CHOICES: Record<ToolChoice, string> = {
  auto: "decides whether it calls one",
  required: "has to call one",
  none: "calls none",
};
const TASKS = { chat: "Chat", completions: "Text completion" } as const;

export function TaskChoice() {
  const { task, turns } = current.value;
  const choose = (next: Conversation["task"]) => {
    if (turns.length) current.value = newConversation({ ...current.value, task: next });
    else update({ task: next });
  };
  return (
    <fieldset class="tasks">
      <legend class="visually-hidden">Task</legend>
      {Object.entries(TASKS).map(([name, label]) => (
        <label key={name} class="check">
          <input
            type="radio"
            name="task"
            checked={task === name}
            onChange={() => choose(name as Conversation["task"])}
          />
          {label}
        </label>
      ))}
    </fieldset>
  );
}

export function SharedSettings() {
  const { id, task, system, tools, toolChoice, schema, logprobs } = current.value;
  const chats = task === "chat";
  // what a conversation brings is shown when it is opened; later only the user opens and closes
  const [showsSystem, showsTools] = useMemo(() => [system !== "" || logprobs, tools !== "" || schema !== ""], [id]);
  return (
    <div class="shared">
      <details class="system" open={showsSystem}>
        <summary>{chats ? "System prompt and token view" : "Token view"}</summary>
        {chats && (
          <>
            <label for="system">System prompt</label>
            <textarea
              id="system"
              rows={2}
              dir="auto"
              value={system}
              onChange={(event) => update({ system: event.currentTarget.value })}
            />
          </>
        )}
        <label class="check">
          <input
            type="checkbox"
            checked={logprobs}
            onChange={(event) => update({ logprobs: event.currentTarget.checked })}
          />
          Show the probabilities of tokens in new answers
        </label>
      </details>
      {chats && (
        <details class="system" open={showsTools}>
          <summary>Tools and JSON schema</summary>
          <JsonBox
            id="tools"
            label="Tools, a JSON list of functions"
            value={tools}
            example={EXAMPLE_TOOLS}
            changed={(value) => update({ tools: value })}
          />
          {tools !== "" && (
            <div>
              <label for="tool-choice">Of these tools, the model</label>
              <select
                id="tool-choice"
                value={toolChoice}
                onChange={(event) => update({ toolChoice: event.currentTarget.value as ToolChoice })}
              >
                {Object.entries(CHOICES).map(([name, label]) => (
                  <option key={name} value={name}>
                    {label}
                  </option>
                ))}
              </select>
            </div>
          )}
          <JsonBox
            id="schema"
            label="JSON schema of the answer"
            value={schema}
            example={EXAMPLE_SCHEMA}
            changed={(value) => update({ schema: value })}
          />
        </details>
      )}
    </div>
  );
}

interface BoxProps {
  id: string;
  label: string;
  value: string;
  example: unknown;
  changed: (value: string) => void;
}

function JsonBox({ id, label, value, example, changed }: BoxProps) {
  const [error, setError] = useState("");
  const take = (text: string) => {
    changed(text);
    try {
      parsed(label, text);
      setError("");
    } catch (problem) {
      setError(messageOf(problem));
    }
  };
  return (
    <div>
      <label for={id}>{label}</label>
      <textarea
        id={id}
        class="code"
        rows={4}
        spellcheck={false}
        value={value}
        aria-invalid={error !== ""}
        aria-describedby={error ? `${id}-error` : undefined}
        onChange={(event) => take(event.currentTarget.value)}
      />
      {error && (
        <p id={`${id}-error`} class="error">
          {error}
        </p>
      )}
      {value === "" && (
        <button type="button" aria-label={`Example: ${label}`} onClick={() => take(JSON.stringify(example, null, 2))}>
          Fill in an example
        </button>
      )}
    </div>
  );
}

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
  additionalProperties: false,
};
