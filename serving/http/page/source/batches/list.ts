/** A list of OpenAI's API, read page by page, and again and again while something in it still changes. */

import { useCallback, useEffect, useState } from "preact/hooks";

import { getJson, messageOf } from "../api";

const SECONDS = 5;
const LIMIT = 20; // entries of a page

interface Page<T> {
  data: T[];
  last_id: string | null;
  has_more: boolean;
}

interface State<T> {
  found: T[] | null; // null until the server has answered once
  earlier: boolean; // there are entries that are older
  error: string; // why the last attempt failed; what was found before stays
}

export interface Listed<T> extends State<T> {
  more: () => void;
  reload: () => void;
}

/** Read the list at `path`, newest entries first; every few seconds, in a tab that is visible, while `changes` says so. */
export function useList<T>(path: string, changes: (found: T[]) => boolean = () => false): Listed<T> {
  const [state, set] = useState<State<T>>({ found: null, earlier: false, error: "" });
  const [pages, setPages] = useState(1);
  const [times, again] = useState(0);
  const reload = useCallback(() => again((n) => n + 1), []);
  const more = useCallback(() => setPages((n) => n + 1), []);
  useEffect(() => {
    let wanted = true;
    read<T>(path, pages).then(
      (read) => wanted && set({ ...read, error: "" }),
      (error: unknown) => wanted && set((known) => ({ ...known, error: messageOf(error) })),
    );
    return () => {
      wanted = false;
    };
  }, [path, pages, times]);
  useEffect(() => {
    if (state.found === null || !changes(state.found)) return;
    const timer = setInterval(() => {
      if (document.hidden) return;
      clearInterval(timer); // the next one begins with the answer, however long that takes
      reload();
    }, SECONDS * 1000);
    return () => clearInterval(timer);
  }, [state]);
  return { ...state, more, reload };
}

async function read<T>(path: string, pages: number): Promise<{ found: T[]; earlier: boolean }> {
  const found: T[] = [];
  const query = new URLSearchParams({ limit: String(LIMIT) });
  for (let count = 1; ; count++) {
    const { data, last_id, has_more } = await getJson<Page<T>>(`${path}?${query.toString()}`);
    found.push(...data);
    if (!has_more || last_id === null || count === pages) return { found, earlier: has_more };
    query.set("after", last_id);
  }
}
