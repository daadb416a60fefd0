/** A form of a few texts and choices, whose refusal by the server is shown in its own words. */

import { useEffect, useRef, useState } from "preact/hooks";

import { messageOf } from "../api";

export type Given = Record<string, string>;

export interface EntryField {
  name: string;
  label: string;
  options?: string[];
  optional?: boolean;
}

interface Props {
  title: string;
  prefix: string; // of the fields' ids
  fields: EntryField[];
  save: (given: Given) => Promise<string[]>; // the server's notes
  note?: string;
  fill?: Filling | null;
}

/** Values that are put into the form, whenever it gets others, and the field that gets the focus. */
export interface Filling {
  values: Given;
  focus: string;
}

export function EntryForm({ title, prefix, fields, save, note, fill }: Props) {
  const form = useRef<HTMLFormElement>(null);
  useEffect(() => {
    if (!fill || form.current === null) return;
    for (const { name } of fields) {
      const field = form.current.elements.namedItem(name) as HTMLInputElement | HTMLSelectElement;
      field.value = fill.values[name] ?? "";
      if (name === fill.focus) field.focus();
    }
  }, [fill]);
  const [error, setError] = useState("");
  const [notes, setNotes] = useState<string[]>([]);
  const submit = async () => {
    if (form.current === null) return;
    const data = new FormData(form.current);
    const given = Object.fromEntries(fields.map(({ name }) => [name, String(data.get(name) ?? "").trim()]));
    try {
      setNotes(await save(given));
      setError("");
      form.current?.reset();
    } catch (problem) {
      setError(messageOf(problem));
    }
  };
  return (
    <form
      ref={form}
      class="new-key"
      aria-label={title}
      autocomplete="off"
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <h3>{title}</h3>
      <div class="fields">
        {fields.map(({ name, label, options, optional }) => (
          <div key={name}>
            <label for={`${prefix}-${name}`}>{label}</label>
            {options === undefined ? (
              <input id={`${prefix}-${name}`} name={name} required={!optional} maxLength={256} />
            ) : (
              <select id={`${prefix}-${name}`} name={name}>
                {options.map((one) => (
                  <option key={one}>{one}</option>
                ))}
              </select>
            )}
          </div>
        ))}
      </div>
      {note && <p class="note">{note}</p>}
      {error && <p class="error">{error}</p>}
      {notes.map((note) => (
        <p key={note} class="note">
          {note}
        </p>
      ))}
      <button type="submit" class="primary">
        {title}
      </button>
    </form>
  );
}
