/** Prompts of MLflow's registry: found, loaded with their variables filled in, edited, and saved as a new version. */

import { useState } from "preact/hooks";

import { call, getJson, messageOf } from "../api";
import type { PromptDetails, PromptList, PromptVersionInfo } from "../api_types";
import { Shown, useLoaded } from "../loading";
import { parsed } from "../playground/request";
import { say } from "../status";
import { TemplateEditor } from "./editor";
import { begin, draft, draftOf, fromConversation, hasBlocks, variablesOf } from "./template";

export function Prompts() {
  const [open, setOpen] = useState(false);
  return (
    <details class="system prompts" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Prompts of MLflow</summary>
      {open && <Registry />}
    </details>
  );
}

function Registry() {
  const loaded = useLoaded<PromptList>("api/2.0/prompts?limit=200");
  return (
    <>
      {loaded.value === null && !loaded.error && <p class="note">MLflow is asked, which takes some seconds.</p>}
      <Shown loaded={loaded}>
        {({ prompts, more }) => (
          <>
            <Finder names={prompts.map((one) => one.name)} more={more} />
            <UseForm />
            <SaveForm saved={loaded.reload} />
          </>
        )}
      </Shown>
    </>
  );
}

function Finder({ names, more }: { names: string[]; more: boolean }) {
  const [name, setName] = useState("");
  const [version, setVersion] = useState("");
  const [running, setRunning] = useState(false);
  const [problem, setProblem] = useState("");
  const [known, setKnown] = useState<PromptDetails | null>(null); // the prompt that was loaded last
  const load = async () => {
    setRunning(true);
    try {
      const query = version.trim() ? `?version=${encodeURIComponent(version.trim())}` : "";
      const found = await getJson<PromptDetails>(`api/2.0/prompts/${encodeURIComponent(name.trim())}${query}`);
      draft.value = draftOf(found);
      setKnown(found);
      setProblem("");
      say(`Version ${found.version} of ${found.name} is loaded.`);
    } catch (error) {
      setProblem(messageOf(error));
    }
    setRunning(false);
  };
  return (
    <form
      aria-label="Load a prompt"
      onSubmit={(event) => {
        event.preventDefault();
        void load();
      }}
    >
      <div class="fields">
        <div>
          <label for="prompt-name">Name of the prompt</label>
          <input
            id="prompt-name"
            list="prompt-names"
            required
            autocomplete="off"
            maxLength={250}
            value={name}
            onInput={(event) => setName(event.currentTarget.value)}
          />
          <datalist id="prompt-names">
            {names.map((one) => (
              <option key={one} value={one} />
            ))}
          </datalist>
        </div>
        <div>
          <label for="prompt-version">Version or alias</label>
          <input
            id="prompt-version"
            placeholder="newest"
            maxLength={250}
            value={version}
            onInput={(event) => setVersion(event.currentTarget.value)}
          />
        </div>
      </div>
      <p class="note" dir="auto">
        {names.length ? `In the registry: ${names.join(", ")}${more ? " and more" : ""}.` : "The registry has no prompts yet."}
      </p>
      {known && known.versions.length > 0 && (
        <p class="note" dir="auto">
          Versions of {known.name}: {known.versions.map(versionName).join(", ")}.
        </p>
      )}
      {problem && <p class="error">{problem}</p>}
      <button type="submit" disabled={running}>
        Load
      </button>
      {running && <span class="note"> MLflow is asked …</span>}
    </form>
  );
}

function versionName({ version, commit_message: message }: PromptVersionInfo): string {
  return message ? `${version} (${message})` : String(version);
}

/** The values of the variables, and the button that begins a conversation with them. */
function UseForm() {
  const { name, version, template } = draft.value;
  const [values, set] = useState<Record<string, string>>({});
  const [problem, setProblem] = useState("");
  if (!template.length) return null;
  const use = () => {
    try {
      begin(draft.value, values);
      setProblem("");
      say("The prompt is in the playground.");
      document.getElementById("message")?.focus();
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  return (
    <form
      aria-label="Use the prompt"
      onSubmit={(event) => {
        event.preventDefault();
        use();
      }}
    >
      <h3 dir="auto">{version === null ? "A new prompt" : `${name}, version ${version}`}</h3>
      <div class="fields">
        {variablesOf(template).map((one) => (
          <div key={one}>
            <label for={`variable-${one}`}>{one}</label>
            <textarea
              id={`variable-${one}`}
              rows={1}
              dir="auto"
              value={values[one] ?? ""}
              onInput={(event) => set({ ...values, [one]: event.currentTarget.value })}
            />
          </div>
        ))}
      </div>
      {hasBlocks(template) && (
        <p class="error">This is a Jinja2 template with {"{% … %}"}. The page fills in variables only; MLflow renders the rest.</p>
      )}
      {problem && <p class="error">{problem}</p>}
      <button type="submit" class="primary">
        Use it in a new conversation
      </button>
    </form>
  );
}

function SaveForm({ saved }: { saved: () => void }) {
  const [message, setMessage] = useState("");
  const [running, setRunning] = useState(false);
  const [problem, setProblem] = useState("");
  const now = draft.value;
  const save = async () => {
    setRunning(true);
    try {
      const schema = parsed("JSON schema", now.schema);
      const body = {
        name: now.name,
        template: now.template,
        ...(message.trim() ? { commit_message: message.trim() } : {}),
        ...(schema === undefined ? {} : { response_format: schema }),
        ...(Object.keys(now.settings).length ? { model_config: now.settings } : {}),
      };
      const found = (await (await call("api/2.0/prompts", { method: "POST", body })).json()) as PromptDetails;
      draft.value = draftOf(found);
      setMessage("");
      setProblem("");
      say(`Version ${found.version} of ${found.name} is saved.`);
      saved();
    } catch (error) {
      setProblem(messageOf(error));
    }
    setRunning(false);
  };
  return (
    <form
      aria-label="Save a version"
      onSubmit={(event) => {
        event.preventDefault();
        void save();
      }}
    >
      <button type="button" onClick={() => (draft.value = fromConversation(now.name))}>
        Take the conversation
      </button>
      <TemplateEditor />
      <div class="fields">
        <div>
          <label for="save-name">Save as</label>
          <input
            id="save-name"
            required
            maxLength={250}
            value={now.name}
            onInput={(event) => (draft.value = { ...now, name: event.currentTarget.value })}
          />
        </div>
        <div>
          <label for="save-message">What is new</label>
          <input
            id="save-message"
            maxLength={1000}
            value={message}
            onInput={(event) => setMessage(event.currentTarget.value)}
          />
        </div>
      </div>
      {problem && <p class="error">{problem}</p>}
      <button type="submit" disabled={running || !now.template.length}>
        Save a version
      </button>
      {running && <span class="note"> MLflow is asked …</span>}
    </form>
  );
}
