/** Read something of the server and show it, or the server's own words of why not. */

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";

import { getJson, messageOf } from "./api";

export interface Loaded<T> {
  value: T | null;
  error: string;
  reload: () => void;
}

/** Read `path`, and again when `time` changes or `reload` is called; what was read is shown until then. */
export function useLoaded<T>(path: string, time = 0): Loaded<T> {
  const [state, set] = useState<{ value: T | null; error: string }>({ value: null, error: "" });
  const [times, again] = useState(0);
  useEffect(() => {
    let wanted = true;
    getJson<T>(path).then(
      (value) => wanted && set({ value, error: "" }),
      (error: unknown) => wanted && set({ value: null, error: messageOf(error) }),
    );
    return () => {
      wanted = false;
    };
  }, [path, time, times]);
  const reload = useCallback(() => again((n) => n + 1), []);
  return { ...state, reload };
}

/** Show what was loaded; until then, that it is loading; if it was refused, the reason. */
export function Shown<T>({ loaded, children }: { loaded: Loaded<T>; children: (value: T) => ComponentChildren }) {
  if (loaded.error) return <p class="error">{loaded.error}</p>;
  if (loaded.value === null) return <p class="note">Loading …</p>;
  return <>{children(loaded.value)}</>;
}

/** A table that scrolls by itself in a narrow window. */
export function Table({ caption, head, children }: { caption: string; head: string[]; children: ComponentChildren }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption class="visually-hidden">{caption}</caption>
        <thead>
          <tr>
            {head.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
