/** API keys: list, create, revoke. */

import { useRef, useState } from "preact/hooks";

import { call, messageOf } from "../api";
import type { KeyInfo, KeyList, NewKey } from "../api_types";
import { Shown, Table, useLoaded } from "../loading";
import { say } from "../status";

const SCOPES = ["invoke", "usage", "manage", "end_users"];
const HEAD = ["Key", "Tenant", "Name", "Scopes", "May use", "Until", "State", "Action"];

export function Keys() {
  const keys = useLoaded<KeyList>("api/2.0/keys");
  return (
    <Shown loaded={keys}>
      {({ keys: found }) => (
        <>
          {found.length ? (
            <Table caption="Keys" head={HEAD}>
              {found.map((one) => (
                <KeyRow key={one.key_id} one={one} changed={keys.reload} />
              ))}
            </Table>
          ) : (
            <p class="note">There are no keys yet.</p>
          )}
          <CreateKey created={keys.reload} />
        </>
      )}
    </Shown>
  );
}

function KeyRow({ one, changed }: { one: KeyInfo; changed: () => void }) {
  const [asked, ask] = useState(false);
  const [error, setError] = useState("");
  const revoke = async () => {
    try {
      await call(`api/2.0/keys/${encodeURIComponent(one.key_id)}`, { method: "DELETE" });
      say(`The key ${one.key_id} is revoked.`);
      ask(false);
      changed();
    } catch (problem) {
      setError(messageOf(problem));
    }
  };
  return (
    <tr>
      <th scope="row">
        <code>{one.key_id}</code> <span class="note">{one.prefix}…</span>
      </th>
      <td dir="auto">{one.tenant}</td>
      <td dir="auto">{one.name}</td>
      <td>{one.scopes.join(", ")}</td>
      <td dir="auto">{one.endpoints?.join(", ") ?? "everything"}</td>
      <td>{one.expires_ms === null ? "no end" : new Date(one.expires_ms).toISOString().slice(0, 16).replace("T", " ")}</td>
      <td>{one.state}</td>
      <td>
        {one.state === "active" && !asked && (
          <button type="button" aria-label={`Revoke ${one.key_id}`} onClick={() => ask(true)}>
            Revoke
          </button>
        )}
        {asked && (
          <span class="actions">
            <button
              type="button"
              class="danger"
              ref={(button) => button?.focus()}
              aria-label={`Revoke ${one.key_id} for ever`}
              onClick={() => void revoke()}
            >
              Revoke for ever
            </button>
            <button type="button" onClick={() => ask(false)}>
              Keep
            </button>
          </span>
        )}
        {error && <p class="error">{error}</p>}
      </td>
    </tr>
  );
}

function CreateKey({ created }: { created: () => void }) {
  const form = useRef<HTMLFormElement>(null);
  const [made, setMade] = useState<NewKey | null>(null);
  const [error, setError] = useState("");
  const create = async () => {
    if (form.current === null) return;
    const given = new FormData(form.current);
    const text = (name: string) => String(given.get(name) ?? "").trim();
    const endpoints = text("endpoints").split(/[\s,]+/).filter(Boolean);
    const body = {
      tenant: text("tenant"),
      name: text("name"),
      scopes: given.getAll("scopes"),
      ...(endpoints.length ? { endpoints } : {}),
      ...(text("expires") ? { expires: text("expires") } : {}),
    };
    try {
      const response = await call("api/2.0/keys", { method: "POST", body });
      setMade((await response.json()) as NewKey);
      setError("");
      form.current.reset();
      say("The key is created. Its secret is shown once.");
      created();
    } catch (problem) {
      setError(messageOf(problem));
    }
  };
  return (
    <>
      {made && (
        <div class="secret">
          <p>
            The secret of the new key, shown this once: <code>{made.secret}</code>
          </p>
          {made.notes.map((note) => (
            <p key={note} class="note">
              {note}
            </p>
          ))}
          <button type="button" onClick={() => setMade(null)}>
            I have kept it
          </button>
        </div>
      )}
      <form
        ref={form}
        class="new-key"
        aria-label="Create a key"
        autocomplete="off"
        onSubmit={(event) => {
          event.preventDefault();
          void create();
        }}
      >
        <h3>Create a key</h3>
        <div class="fields">
          <div>
            <label for="new-tenant">Tenant</label>
            <input id="new-tenant" name="tenant" required maxLength={128} />
          </div>
          <div>
            <label for="new-name">Name (a note for people)</label>
            <input id="new-name" name="name" maxLength={256} />
          </div>
          <div>
            <label for="new-endpoints">Endpoints (empty: everything)</label>
            <input id="new-endpoints" name="endpoints" placeholder="assistant assistant:pirate" />
          </div>
          <div>
            <label for="new-expires">Until (empty: no end)</label>
            <input id="new-expires" name="expires" placeholder="90d or 2030-01-01" />
          </div>
        </div>
        <fieldset class="scopes">
          <legend>Scopes</legend>
          {SCOPES.map((scope) => (
            <label key={scope} class="check">
              <input type="checkbox" name="scopes" value={scope} defaultChecked={scope === "invoke"} />
              {scope}
            </label>
          ))}
        </fieldset>
        {error && <p class="error">{error}</p>}
        <button type="submit" class="primary">
          Create key
        </button>
      </form>
    </>
  );
}
