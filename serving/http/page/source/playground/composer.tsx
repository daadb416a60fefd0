/** The box for the next message. Enter sends, Shift+Enter begins a line. */

import { useState } from "preact/hooks";

import { modelGroups } from "../models";
import { ask, numRunning, stop } from "./chat";

export function Composer() {
  const [text, setText] = useState("");
  const running = numRunning.value > 0;
  const send = () => {
    if (running || !text.trim() || !modelGroups.value.length) return;
    ask(text);
    setText("");
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <label for="message">Message</label>
      <textarea
        id="message"
        rows={3}
        dir="auto"
        value={text}
        aria-describedby="message-hint"
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          send();
        }}
      />
      <div class="actions">
        <button type="submit" class="primary" disabled={running || !modelGroups.value.length}>
          Send
        </button>
        <button type="button" disabled={!running} onClick={() => stop()}>
          Stop all
        </button>
        <span id="message-hint" class="note">
          Enter sends, Shift+Enter begins a new line.
        </span>
      </div>
    </form>
  );
}
