/** The frame around the views: navigation, the key, the live region. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { apiKey, keyRefused, setKey } from "./api";
import { loadAccount } from "./account";
import { Batches } from "./batches/batches";
import { Embeddings } from "./embeddings/embeddings";
import { loadModels } from "./models";
import { Operations } from "./operations/operations";
import { Playground } from "./playground/playground";
import { Reference } from "./reference/reference";
import { Status, say } from "./status";
import { TableRun } from "./table/table_run";
import { Usage } from "./usage/usage";

const VIEWS = {
  playground: "Playground",
  embeddings: "Embeddings",
  table: "Table",
  batches: "Batches",
  usage: "My usage",
  operations: "Operations",
  reference: "API reference",
} as const;
type View = keyof typeof VIEWS;

const view = signal<View>(viewInAddress());

function viewInAddress(): View {
  const name = location.hash.replace(/^#\//, "");
  return name in VIEWS ? (name as View) : "playground";
}

export function App() {
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    const changed = () => {
      view.value = viewInAddress();
      main.current?.focus();
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    document.title = `${VIEWS[view.value]} – mlflow-llm`;
  }, [view.value]);
  useEffect(() => {
    void loadModels();
    void loadAccount();
  }, [apiKey.value]);
  return (
    <>
      <button type="button" class="skip" onClick={() => main.current?.focus()}>
        Skip to the content
      </button>
      <header class="top">
        <span class="brand">mlflow-llm</span>
        <nav aria-label="Views">
          <ul>
            {Object.entries(VIEWS).map(([name, title]) => (
              <li key={name}>
                <a href={`#/${name}`} aria-current={view.value === name ? "page" : undefined}>
                  {title}
                </a>
              </li>
            ))}
          </ul>
        </nav>
        <KeyForm />
      </header>
      <main ref={main} tabIndex={-1} aria-label={VIEWS[view.value]}>
        {/* the views start afresh with another key */}
        {view.value === "playground" && <Playground />}
        {view.value === "embeddings" && <Embeddings />}
        {view.value === "table" && <TableRun />}
        {view.value === "reference" && <Reference />}
        {view.value === "batches" && <Batches key={apiKey.value} />}
        {view.value === "usage" && <Usage key={apiKey.value} />}
        {view.value === "operations" && <Operations key={apiKey.value} />}
      </main>
      <Status />
    </>
  );
}

function KeyForm() {
  const input = useRef<HTMLInputElement>(null);
  if (apiKey.value && !keyRefused.value) {
    return (
      <div class="key">
        <span>Key {apiKey.value.slice(0, 11)}…</span>
        <button type="button" onClick={() => (setKey(""), say("The key is forgotten."))}>
          Forget key
        </button>
      </div>
    );
  }
  return (
    <form
      class="key"
      autocomplete="off"
      onSubmit={(event) => {
        event.preventDefault();
        setKey(input.current?.value.trim() ?? "");
        say("The key is set for this tab.");
      }}
    >
      <label for="api-key">API key</label>
      <input
        id="api-key"
        ref={input}
        type="password"
        autocomplete="off"
        spellcheck={false}
        required
        aria-describedby={keyRefused.value ? "key-refused" : undefined}
      />
      <button type="submit">Use key</button>
      {keyRefused.value && (
        <span id="key-refused" class="error">
          {apiKey.value ? "The server does not know this key." : "This server asks for a key."}
        </span>
      )}
    </form>
  );
}
