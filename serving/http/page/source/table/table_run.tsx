/** The view of a table run: CSV in, answers out. */

import { useState } from "preact/hooks";

import { account, costOf, isFree, money, priceOf } from "../account";
import { messageOf } from "../api";
import { download } from "../download";
import { Table } from "../loading";
import { endpointOf, namesOf } from "../models";
import { parseCsv, writeCsv } from "./csv";
import { type RowAnswer, type RunSettings, answers, open, run, runs, stop, table } from "./run";

const SHOWN = 20; // rows
const FIELDS = { maxTokens: "Max tokens", temperature: "Temperature" } as const;

export function TableRun() {
  const names = namesOf("chat");
  const [settings, set] = useState<RunSettings>({
    model: "",
    template: "",
    system: "",
    maxTokens: "128",
    temperature: "0",
  });
  const [problem, setProblem] = useState("");
  const model = names.includes(settings.model) ? settings.model : (names[0] ?? "");
  const change = (changed: Partial<RunSettings>) => set((known) => ({ ...known, ...changed }));
  const opened = async (file: File | undefined) => {
    if (file === undefined) return;
    try {
      const [head, ...rows] = parseCsv(await file.text());
      if (head === undefined || !rows.length) throw new Error("The file needs a line of names and at least one row.");
      open({ name: file.name, head, rows });
      if (!settings.template) change({ template: `{${head[0]}}` });
      setProblem("");
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  const begin = () => {
    setProblem("");
    run({ ...settings, model }).catch((error: unknown) => setProblem(messageOf(error)));
  };
  const found = table.value;
  const done = [...answers.value.values()].filter((one) => !one.error).length;
  return (
    <div class="page">
      <h1>Table</h1>
      <p class="note">One answer for each row of a CSV file. The file stays in this tab; only the filled prompts are sent.</p>
      <form
        class="table-run"
        onSubmit={(event) => {
          event.preventDefault();
          begin();
        }}
        onDragOver={(event) => event.preventDefault()}
        onDrop={(event) => {
          event.preventDefault();
          void opened(event.dataTransfer?.files[0]);
        }}
      >
        <label class="file">
          {found ? `${found.name}: ${found.rows.length} rows` : "Choose or drop a CSV file"}
          <input
            type="file"
            accept=".csv,text/csv"
            onChange={(event) => void opened(event.currentTarget.files?.[0])}
          />
        </label>
        <div class="fields">
          <div>
            <label for="run-model">Model</label>
            <select id="run-model" value={model} onChange={(event) => change({ model: event.currentTarget.value })}>
              {names.map((name) => (
                <option key={name} value={name}>
                  {name}
                </option>
              ))}
            </select>
          </div>
          {Object.entries(FIELDS).map(([name, label]) => (
            <div key={name}>
              <label for={`run-${name}`}>{label}</label>
              <input
                id={`run-${name}`}
                type="number"
                min={0}
                step="any"
                value={settings[name as keyof typeof FIELDS]}
                onInput={(event) => change({ [name]: event.currentTarget.value })}
              />
            </div>
          ))}
        </div>
        <label for="run-system">System prompt</label>
        <textarea
          id="run-system"
          rows={2}
          dir="auto"
          value={settings.system}
          onInput={(event) => change({ system: event.currentTarget.value })}
        />
        <label for="run-template">Prompt of a row; {"{name}"} is the value of the column with this name</label>
        <textarea
          id="run-template"
          rows={3}
          dir="auto"
          value={settings.template}
          onInput={(event) => change({ template: event.currentTarget.value })}
        />
        {problem && <p class="error">{problem}</p>}
        <div class="actions">
          <button type="submit" class="primary" disabled={!found || runs.value || !names.length || done === found.rows.length}>
            {done ? "Go on" : "Run"}
          </button>
          <button type="button" disabled={!runs.value} onClick={stop}>
            Stop
          </button>
          <button type="button" disabled={!answers.value.size} onClick={() => save()}>
            Download CSV
          </button>
        </div>
      </form>
      {found && <Progress done={done} total={found.rows.length} model={model} />}
      {found && (
        <Table caption="Rows and their answers" head={[...found.head, "Answer"]}>
          {found.rows.slice(0, SHOWN).map((row, place) => (
            <tr key={place}>
              {found.head.map((_, at) => (
                <td key={at} dir="auto">
                  {row[at]}
                </td>
              ))}
              <AnswerCell answer={answers.value.get(place)} />
            </tr>
          ))}
        </Table>
      )}
      {found && found.rows.length > SHOWN && (
        <p class="note">The first {SHOWN} rows are shown; the downloaded file has all.</p>
      )}
    </div>
  );
}

function AnswerCell({ answer }: { answer: RowAnswer | undefined }) {
  if (answer?.error) return <td class="error">{answer.error}</td>;
  return <td dir="auto">{answer?.text ?? "–"}</td>;
}

function Progress({ done, total, model }: { done: number; total: number; model: string }) {
  const found = [...answers.value.values()];
  const sum = (name: "promptTokens" | "completionTokens") => found.reduce((all, one) => all + one[name], 0);
  const [prompt, completion] = [sum("promptTokens"), sum("completionTokens")];
  const price = priceOf(endpointOf(model), "");
  const failed = found.filter((one) => one.error).length;
  return (
    <div class="progress">
      <label for="run-progress">
        {done} of {total} rows answered{failed > 0 && `, ${failed} failed`}; {prompt.toLocaleString()} prompt and{" "}
        {completion.toLocaleString()} answer tokens
        {price && !isFree(price) && `; at most ${money(costOf(price, prompt, 0, completion), account.value?.currency ?? "")}`}
      </label>
      <progress id="run-progress" value={done} max={total} />
    </div>
  );
}

function save(): void {
  const found = table.value;
  if (found === null) return;
  const head = [...found.head, "answer", "error", "prompt_tokens", "completion_tokens"];
  const rows = found.rows.map((row, place) => {
    const one = answers.value.get(place);
    const cells = found.head.map((_, at) => row[at] ?? "");
    if (one === undefined) return [...cells, "", "", "", ""];
    return [...cells, one.text, one.error, String(one.promptTokens), String(one.completionTokens)];
  });
  download("answers.csv", new Blob([writeCsv([head, ...rows])], { type: "text/csv" }));
}
