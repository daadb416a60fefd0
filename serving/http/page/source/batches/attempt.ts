/** The actions of a row's buttons: the outcome is said, and why it failed stays in the row. */

import { useState } from "preact/hooks";

import { messageOf } from "../api";
import { say } from "../status";

interface Attempts {
  error: string; // of the last attempt
  attempt: (work: () => Promise<unknown>, done: string) => Promise<boolean>; // whether it succeeded
}

export function useAttempts(): Attempts {
  const [error, setError] = useState("");
  const attempt = async (work: () => Promise<unknown>, done: string) => {
    try {
      await work();
      setError("");
      say(done);
      return true;
    } catch (problem) {
      setError(messageOf(problem));
      say(messageOf(problem));
      return false;
    }
  };
  return { error, attempt };
}
