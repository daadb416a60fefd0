/** A dialog with the request of an answer as code. */

import { useState } from "preact/hooks";

import { Dialog } from "../dialog";
import { say } from "../status";
import { hasKey } from "./chat";
import { LANGUAGES, type Language, code } from "./code";
import type { TaskRequest } from "./request";

export function CodeDialog({ request, close }: { request: TaskRequest; close: () => void }) {
  const [language, choose] = useState<Language>("curl");
  const text = code(language, request, new URL(".", document.baseURI).href, hasKey());
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("The code is copied.");
    } catch {
      say("The browser does not allow copying; select the code instead.");
    }
  };
  return (
    <Dialog title="The request as code" close={close} actions={<CopyButton copy={copy} />}>
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
    </Dialog>
  );
}

function CopyButton({ copy }: { copy: () => Promise<void> }) {
  return (
    <button type="button" class="primary" onClick={() => void copy()}>
      Copy
    </button>
  );
}
