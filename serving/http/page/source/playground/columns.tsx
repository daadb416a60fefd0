/** The settings of each column: model or adapter, sampling, stops. */

import { fittingTemperature, groupsOf, namesOf, ownSampling } from "../models";
import { type Column, MAX_COLUMNS, current, newColumn, update } from "./conversation";

type Field = Exclude<keyof Column, "model" | "stop">;

const FIELDS: { name: Field; label: string; min: number; max?: number; step: string }[] = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any" },
  { name: "topP", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "maxTokens", label: "Max tokens", min: 1, step: "1" },
  { name: "seed", label: "Seed", min: 0, step: "1" },
  { name: "n", label: "Answers (n)", min: 1, step: "1" },
];

function temperatureShown(model: string): string {
  return String(fittingTemperature(model) ?? ownSampling(model)["temperature"] ?? "default");
}

/** Return what an empty temperature means for a model, and why. */
function temperatureReason(model: string): string {
  const fitting = fittingTemperature(model);
  if (fitting !== null) {
    return `An empty temperature is ${fitting}: the model brings none of its own, and at the API's 1 small models ramble.`;
  }
  const own = Object.entries(ownSampling(model)).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  return `An empty field is the model's own value: ${own.join(", ")}.`;
}

function change(index: number, changed: Partial<Column>): void {
  update({ columns: current.value.columns.map((one, place) => (place === index ? { ...one, ...changed } : one)) });
}

/** Add a column: with the next model that no column has yet. It can only be done before the first turn. */
function add(): void {
  const { columns, task } = current.value;
  const taken = new Set(columns.map((one) => one.model));
  const names = namesOf(task);
  const last = columns[columns.length - 1] ?? newColumn();
  const model = names.find((name) => !taken.has(name)) ?? last.model;
  update({ columns: [...columns, { ...last, model }] });
}

export function Columns() {
  const { columns, turns, task } = current.value;
  const begun = turns.length > 0;
  return (
    <section aria-label="Columns">
      <div class="grid">
        {columns.map((column, index) => (
          <fieldset key={index} class="column">
            <legend>Column {index + 1}</legend>
            <label for={`model-${index}`}>Model</label>
            <select id={`model-${index}`} value={column.model} onChange={(e) => change(index, { model: e.currentTarget.value })}>
              {groupsOf(task).map((group) => (
                <optgroup key={group.endpoint} label={group.endpoint}>
                  {group.names.map((name) => (
                    <option key={name} value={name}>
                      {name}
                    </option>
                  ))}
                </optgroup>
              ))}
            </select>
            <details>
              <summary>Sampling</summary>
              <div class="fields">
                {FIELDS.map(({ name, label, ...bounds }) => (
                  <div key={name}>
                    <label for={`${name}-${index}`}>{label}</label>
                    <input
                      id={`${name}-${index}`}
                      type="number"
                      placeholder={name === "temperature" ? temperatureShown(column.model) : "default"}
                      aria-describedby={name === "temperature" ? `temperature-why-${index}` : undefined}
                      value={column[name]}
                      {...bounds}
                      onInput={(e) => change(index, { [name]: e.currentTarget.value })}
                    />
                  </div>
                ))}
              </div>
              <p id={`temperature-why-${index}`} class="note">
                {temperatureReason(column.model)}
              </p>
              <label for={`stop-${index}`}>Stop sequences, one a line</label>
              <textarea
                id={`stop-${index}`}
                rows={2}
                value={column.stop}
                onInput={(e) => change(index, { stop: e.currentTarget.value })}
              />
            </details>
            {!begun && columns.length > 1 && (
              <button
                type="button"
                aria-label={`Remove column ${index + 1}`}
                onClick={() => update({ columns: columns.filter((_, place) => place !== index) })}
              >
                Remove
              </button>
            )}
          </fieldset>
        ))}
      </div>
      {!begun && columns.length < MAX_COLUMNS && (
        <button type="button" onClick={add}>
          Add a column
        </button>
      )}
    </section>
  );
}
