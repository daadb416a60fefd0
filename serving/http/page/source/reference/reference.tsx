/** The API reference: each route of the server with its fields, and a request that can be sent from here. */

import { useState } from "preact/hooks";

import { apiKey } from "../api";
import { Shown, useLoaded } from "../loading";
import { namesOf } from "../models";
import { say } from "../status";
import { type Field, type Listed, type Media, type OpenApi, exampleOf, fieldsOf, operationsOf, typeOf } from "./document";

const MAX_SHOWN = 100_000; // characters of an answer

export function Reference() {
  const loaded = useLoaded<OpenApi>("openapi.json");
  return (
    <div class="page">
      <h1>API reference</h1>
      <p class="note">
        Every route of this server, from its <a href="openapi.json">OpenAPI document</a>. Requests are sent with the key of this
        tab, if it has one. <a href="docs">The same on one page</a>, without JavaScript.
      </p>
      <Shown loaded={loaded}>{(document) => <Routes document={document} />}</Shown>
    </div>
  );
}

function Routes({ document }: { document: OpenApi }) {
  const [wanted, want] = useState("");
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const found = operationsOf(document).filter(({ method, path, operation }) => {
    const text = `${method} ${path} ${operation.summary} ${operation.tags.join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const tags = [...new Set(found.map(({ operation }) => operation.tags[0] ?? "other"))];
  return (
    <>
      <label for="wanted">Find a route</label>
      <input id="wanted" type="search" value={wanted} onInput={(event) => want(event.currentTarget.value)} />
      {!found.length && <p class="note">No route has these words.</p>}
      {tags.map((tag) => (
        <section key={tag}>
          <h2>{tag}</h2>
          {found
            .filter(({ operation }) => (operation.tags[0] ?? "other") === tag)
            .map((one) => (
              <Route key={`${one.method} ${one.path}`} document={document} route={one} />
            ))}
        </section>
      ))}
    </>
  );
}

function Route({ document, route }: { document: OpenApi; route: Listed }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="route" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <code>
          <strong>{route.method}</strong> {route.path}
        </code>{" "}
        {route.operation.summary}
      </summary>
      {open && <OpenRoute document={document} route={route} />}
    </details>
  );
}

function OpenRoute({ document, route: { method, path, operation } }: { document: OpenApi; route: Listed }) {
  const media = operation.requestBody?.content["application/json"];
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  return (
    <>
      {operation.parameters.length > 0 && (
        <FieldTable
          caption={`Parameters of ${method} ${path}`}
          fields={operation.parameters.map((one) => ({
            name: `${one.in}: ${one.name}`,
            type: typeOf(document, one.schema),
            required: one.required ?? false,
            about: one.schema.description ?? "",
          }))}
        />
      )}
      {media?.schema && <FieldTable caption={`Body of ${method} ${path}`} fields={fieldsOf(document, media.schema)} />}
      {answer && <FieldTable caption={`Answer of ${method} ${path}`} fields={fieldsOf(document, answer)} />}
      <ul class="plain">
        {Object.entries(operation.responses).map(([status, { description }]) => (
          <li key={status}>
            {status}: {description}
          </li>
        ))}
      </ul>
      <Trial document={document} route={{ method, path, operation }} media={media} />
    </>
  );
}

function FieldTable({ caption, fields }: { caption: string; fields: Field[] }) {
  if (!fields.length) return null;
  return (
    <details>
      <summary>
        {caption} ({fields.length})
      </summary>
      <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
        <table>
          <tbody>
            {fields.map((one) => (
              <tr key={one.name}>
                <th scope="row">
                  <code>{one.name}</code>
                  {one.required && " (required)"}
                </th>
                <td>{one.type}</td>
                <td>{one.about}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

interface TrialProps {
  document: OpenApi;
  route: Listed;
  media: Media | undefined;
}

interface Reply {
  status: string;
  headers: string;
  body: string;
}

function Trial({ document, route: { method, path, operation }, media }: TrialProps) {
  const model = namesOf("chat")[0] ?? namesOf("embeddings")[0] ?? "";
  const example = media === undefined ? "" : JSON.stringify(exampleOf(document, media, model), null, 2);
  const [body, setBody] = useState(example);
  const [values, set] = useState<Record<string, string>>(path.includes("endpoints/{name}") ? { name: model.split(":")[0] ?? "" } : {});
  const [reply, setReply] = useState<Reply | null>(null);
  const [asked, ask] = useState(false);
  const [running, setRunning] = useState(false);
  const id = operation.operationId;
  const changes = method === "DELETE" || (method !== "GET" && path.startsWith("/api/"));
  const send = async () => {
    ask(false);
    setRunning(true);
    const headers: Record<string, string> = {};
    if (apiKey.value) headers["Authorization"] = `Bearer ${apiKey.value}`;
    if (media !== undefined) headers["Content-Type"] = "application/json";
    const query = new URLSearchParams();
    let place = path.replace(/^\//, "");
    for (const one of operation.parameters) {
      const value = values[one.name] ?? "";
      if (one.in === "path") place = place.replace(`{${one.name}}`, encodeURIComponent(value));
      else if (value && one.in === "query") query.set(one.name, value);
      else if (value) headers[one.name] = value;
    }
    const url = new URL(place + (query.size ? `?${query.toString()}` : ""), window.document.baseURI);
    try {
      const began = performance.now();
      const response = await fetch(url, {
        method,
        headers,
        credentials: "same-origin",
        ...(media === undefined ? {} : { body }),
      });
      const text = await response.text();
      setReply({
        status: `${response.status} ${response.statusText}, ${Math.round(performance.now() - began)} ms`,
        headers: [...response.headers].map(([name, value]) => `${name}: ${value}`).join("\n"),
        body: pretty(text).slice(0, MAX_SHOWN),
      });
      say(`The answer has status ${response.status}.`);
    } catch (error) {
      setReply({ status: error instanceof Error ? error.message : String(error), headers: "", body: "" });
    }
    setRunning(false);
  };
  return (
    <form
      class="trial"
      aria-label={`Try ${method} ${path}`}
      onSubmit={(event) => {
        event.preventDefault();
        if (changes && !asked) ask(true);
        else void send();
      }}
    >
      {operation.parameters.length > 0 && (
        <div class="fields">
          {operation.parameters.map((one) => (
            <div key={one.name}>
              <label for={`${id}-${one.name}`}>{one.name}</label>
              <input
                id={`${id}-${one.name}`}
                required={one.required ?? false}
                value={values[one.name] ?? ""}
                onInput={(event) => set({ ...values, [one.name]: event.currentTarget.value })}
              />
            </div>
          ))}
        </div>
      )}
      {media !== undefined && (
        <>
          <label for={`${id}-body`}>Body</label>
          <textarea
            id={`${id}-body`}
            class="code"
            rows={Math.min(14, body.split("\n").length + 1)}
            spellcheck={false}
            value={body}
            onInput={(event) => setBody(event.currentTarget.value)}
          />
        </>
      )}
      {operation.requestBody !== undefined && media === undefined && (
        <p class="note">The body of this route is not JSON; it cannot be tried here.</p>
      )}
      {asked && <p class="error">This changes the server. Send it again to do so.</p>}
      <button
        type="submit"
        class={asked ? "danger" : "primary"}
        disabled={running || (operation.requestBody !== undefined && media === undefined)}
      >
        {asked ? "Send and change the server" : "Send"}
      </button>
      {reply && (
        <div class="reply">
          <p>
            <strong>{reply.status}</strong>
          </p>
          <details>
            <summary>Headers</summary>
            <pre tabIndex={0} role="region" aria-label="Headers of the answer">
              {reply.headers}
            </pre>
          </details>
          <pre tabIndex={0} role="region" aria-label="Answer">
            {reply.body}
          </pre>
        </div>
      )}
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
