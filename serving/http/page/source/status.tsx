/** One polite live region for the page: it says when something begins and ends, never each token. */

import { signal } from "@preact/signals";

const said = signal("");

export function say(text: string): void {
  said.value = text;
}

export function Status() {
  return (
    <p role="status" class="visually-hidden">
      {said.value}
    </p>
  );
}
