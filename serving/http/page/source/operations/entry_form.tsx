/** A form of a few texts and choices, whose refusal by the server is shown in its own words. */

import { useRef, useState } from "preact/hooks";

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
}

export function EntryForm({ title, prefix, fields, save }: Props) {
  const form = useRef<HTMLFormElement>(null);
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
