/** A turn of the conversation: the user's message, which can be edited in a branch, and the answers of the columns. */

import { useEffect, useState } from "preact/hooks";

import { say } from "../status";
import { ColumnAnswers } from "./answer";
import { ask, numRunning } from "./chat";
import { type Turn, branch, current } from "./conversation";
import { Thumbnail } from "./images";
import { TextView } from "./text_view";

interface Props {
  turn: Turn;
  index: number;
  isLast: boolean;
  showCode: (column: number, step: number) => void;
}

export function TurnView({ turn, index, isLast, showCode }: Props) {
  const [edited, edit] = useState<string | null>(null);
  useEffect(() => edit(null), [turn]);
  const branchHere = () => {
    current.value = branch(current.value, index + 1);
    say("This is a new branch; the conversation so far is kept.");
    document.getElementById("message")?.focus();
  };
  return (
    <>
      <h2 class="visually-hidden">Message {index + 1}</h2>
      {edited === null ? (
        <div class="user">
          <div class="said">
            <TextView text={turn.user} />
            {turn.images.length > 0 && (
              <ul class="thumbnails" aria-label={`Images of message ${index + 1}`}>
                {turn.images.map((url, place) => (
                  <li key={place}>
                    <Thumbnail url={url} label={`Image ${place + 1} of message ${index + 1}`} />
                  </li>
                ))}
              </ul>
            )}
          </div>
          <div class="actions">
            <button
              type="button"
              disabled={numRunning.value > 0}
              aria-label={`Edit message ${index + 1}`}
              onClick={() => edit(turn.user)}
            >
              Edit
            </button>
            {!isLast && (
              <button
                type="button"
                disabled={numRunning.value > 0}
                aria-label={`Branch after message ${index + 1}`}
                onClick={branchHere}
              >
                Branch
              </button>
            )}
          </div>
        </div>
      ) : (
        <form
          class="user editing"
          onSubmit={(event) => {
            event.preventDefault();
            if (!edited.trim()) return;
            current.value = branch(current.value, index); // the conversation with the old message stays as it is
            ask(edited, turn.images);
          }}
        >
          <label for={`edit-${index}`}>Edit message {index + 1}</label>
          <textarea
            id={`edit-${index}`}
            rows={3}
            dir="auto"
            value={edited}
            ref={focus}
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
        {turn.answers.map((steps, column) => (
          <ColumnAnswers
            key={column}
            steps={steps}
            column={column}
            isLast={isLast}
            showCode={(step) => showCode(column, step)}
          />
        ))}
      </div>
    </>
  );
}

function focus(box: HTMLTextAreaElement | null): void {
  box?.focus(); // the same function in each render, so that typing does not move the focus
}
