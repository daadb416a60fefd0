/** A dialog with the request of an answer as code. */

import { useEffect, useRef, useState } from "preact/hooks";

import { say } from "../status";
import { type ChatRequest, hasKey } from "./chat";
import { type Language, code } from "./code";

const LANGUAGES: Record<Language, string> = { curl: "curl", python: "Python (openai)" };

export function CodeDialog({ request, close }: { request: ChatRequest; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [language, choose] = useState<Language>("curl");
  const text = code(language, request, new URL(".", document.baseURI).href, hasKey());
  useEffect(() => dialog.current?.showModal(), []);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("The code is copied.");
    } catch {
      say("The browser does not allow copying; select the code instead.");
    }
  };
  return (
    <dialog ref={dialog} aria-labelledby="code-title" onClose={close}>
      <h2 id="code-title">The request as code</h2>
      <label for="language">Language</label>
      <select id="language" value={language} onChange={(e) => choose(e.currentTarget.value as Language)}>
        {Object.entries(LANGUAGES).map(([name, label]) => (
          <option key={name} value={name}>
            {label}
          </option>
        ))}
      </select>
      <pre tabIndex={0} role="region" aria-label="Code">
        {text}
      </pre>
      <div class="actions">
        <button type="button" class="primary" onClick={() => void copy()}>
          Copy
        </button>
        <button type="button" onClick={() => dialog.current?.close()}>
          Close
        </button>
      </div>
    </dialog>
  );
}
