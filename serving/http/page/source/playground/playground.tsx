/** The playground: chat with up to four models, adapters or settings side by side on one prompt. */

import { useSignalEffect } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";

import { download } from "../download";
import { modelNames, modelsError, modelsLoaded } from "../models";
import { AnswerView } from "./answer";
import { type ChatRequest, ask, chatRequest, numRunning, stop } from "./chat";
import { CodeDialog } from "./code_dialog";
import { Columns } from "./columns";
import { Composer } from "./composer";
import { type Turn, branch, current, forget, kept, newConversation, plain, storageProblem, title, update } from "./conversation";

export function Playground() {
  const [shown, showCode] = useState<ChatRequest | null>(null);
  useSignalEffect(chooseModels);
  const conversation = current.value;
  return (
    <div class="playground">
      <Conversations />
      <div class="work">
        <h1>Playground</h1>
        {modelsLoaded.value && modelsError.value && <p class="error">{modelsError.value}</p>}
        <Columns />
        <details class="system" open={conversation.system !== ""}>
          <summary>System prompt and token view</summary>
          <label for="system">System prompt</label>
          <textarea
            id="system"
            rows={2}
            dir="auto"
            value={conversation.system}
            onChange={(event) => update({ system: event.currentTarget.value })}
          />
          <label class="check">
            <input
              type="checkbox"
              checked={conversation.logprobs}
              onChange={(event) => update({ logprobs: event.currentTarget.checked })}
            />
            Show the probabilities of tokens in new answers
          </label>
        </details>
        <ol class="turns" aria-label="Conversation">
          {conversation.turns.map((turn, index) => (
            <TurnView
              key={`${conversation.id} ${index}`}
              turn={turn}
              index={index}
              isLast={index === conversation.turns.length - 1}
              showCode={(column) => showCode(chatRequest(conversation, column, index))}
            />
          ))}
        </ol>
        <Composer />
      </div>
      {shown && <CodeDialog request={shown} close={() => showCode(null)} />}
    </div>
  );
}

/** Give each column whose model is not served a model that is. */
function chooseModels(): void {
  const names = modelNames();
  const { columns } = current.value;
  if (!names.length || columns.every((one) => names.includes(one.model))) return;
  current.value = {
    ...current.value,
    columns: columns.map((one) => (names.includes(one.model) ? one : { ...one, model: names[0] as string })),
  };
}

interface TurnProps {
  turn: Turn;
  index: number;
  isLast: boolean;
  showCode: (column: number) => void;
}

function TurnView({ turn, index, isLast, showCode }: TurnProps) {
  const [edited, edit] = useState<string | null>(null);
  useEffect(() => edit(null), [turn]);
  return (
    <li class="turn">
      <h2 class="visually-hidden">Message {index + 1}</h2>
      {edited === null ? (
        <div class="user">
          <p class="text" dir="auto">
            {turn.user}
          </p>
          <button
            type="button"
            disabled={numRunning.value > 0}
            aria-label={`Edit message ${index + 1}`}
            onClick={() => edit(turn.user)}
          >
            Edit
          </button>
        </div>
      ) : (
        <form
          class="user editing"
          onSubmit={(event) => {
            event.preventDefault();
            if (!edited.trim()) return;
            current.value = branch(current.value, index); // the conversation with the old message stays as it is
            ask(edited);
          }}
        >
          <label for={`edit-${index}`}>Edit message {index + 1}</label>
          <textarea
            id={`edit-${index}`}
            rows={3}
            dir="auto"
            value={edited}
            ref={(box) => box?.focus()}
            onInput={(event) => edit(event.currentTarget.value)}
          />
          <div class="actions">
            <button type="submit" class="primary">
              Ask in a new branch
            </button>
            <button type="button" onClick={() => edit(null)}>
              Cancel
            </button>
          </div>
        </form>
      )}
      <div class="grid">
        {turn.answers.map((answer, column) => (
          <AnswerView key={column} answer={answer} column={column} isLast={isLast} showCode={() => showCode(column)} />
        ))}
      </div>
    </li>
  );
}

function Conversations() {
  const conversation = current.value;
  const begin = () => {
    stop();
    current.value = newConversation(conversation.columns, conversation.system, conversation.logprobs);
    document.getElementById("message")?.focus();
  };
  const exportIt = () => {
    const text = JSON.stringify(plain(conversation), null, 2);
    download("conversation.json", new Blob([text], { type: "application/json" }));
  };
  return (
    <aside class="conversations" aria-label="Conversations">
      <div class="actions">
        <button type="button" onClick={begin}>
          New conversation
        </button>
        <button type="button" disabled={!conversation.turns.length} onClick={exportIt}>
          Export JSON
        </button>
      </div>
      {storageProblem.value && <p class="error">{storageProblem.value}</p>}
      {kept.value.length > 0 && (
        <details open={innerWidth >= 900}>
          <summary>Kept in this browser ({kept.value.length})</summary>
          <ul>
            {kept.value.map((one) => (
              <li key={one.id}>
                <button
                  type="button"
                  class="link"
                  dir="auto"
                  aria-current={one.id === conversation.id ? "true" : undefined}
                  onClick={() => (stop(), (current.value = one))}
                >
                  {title(one)}
                </button>
                <button
                  type="button"
                  aria-label={`Delete the conversation ${title(one)}`}
                  onClick={() => {
                    if (one.id === conversation.id) stop();
                    forget(one.id);
                  }}
                >
                  <span aria-hidden="true">×</span>
                </button>
              </li>
            ))}
          </ul>
        </details>
      )}
    </aside>
  );
}
