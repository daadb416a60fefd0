/** The kept conversations: begin, open, delete, export, import. */

import { useRef, useState } from "preact/hooks";

import { messageOf } from "../api";
import { download } from "../download";
import { stop } from "./chat";
import {
  current,
  forget,
  importConversation,
  kept,
  newConversation,
  plain,
  storageProblem,
  title,
} from "./conversation";

export function Conversations() {
  const conversation = current.value;
  const file = useRef<HTMLInputElement>(null);
  const [problem, setProblem] = useState("");
  const begin = () => {
    stop();
    current.value = newConversation(conversation);
    document.getElementById("message")?.focus();
  };
  const exportIt = () => {
    const text = JSON.stringify(plain(conversation), null, 2);
    download("conversation.json", new Blob([text], { type: "application/json" }));
  };
  const importIt = async () => {
    const [chosen] = file.current?.files ?? [];
    if (chosen === undefined) return;
    stop();
    try {
      importConversation(await chosen.text());
      setProblem("");
    } catch (error) {
      setProblem(messageOf(error));
    }
    if (file.current) file.current.value = "";
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
        <label class="file">
          Import JSON
          <input ref={file} type="file" accept=".json,application/json" onChange={() => void importIt()} />
        </label>
      </div>
      {problem && <p class="error">{problem}</p>}
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
