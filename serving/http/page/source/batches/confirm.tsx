/** A question before something that cannot be undone. */

import type { ComponentChildren } from "preact";

import { Dialog } from "../dialog";

interface Props {
  title: string;
  action: string;
  act: () => void; // after the dialog is closed
  close: () => void;
  children: ComponentChildren;
}

export function Confirm({ title, action, act, close, children }: Props) {
  return (
    <Dialog
      title={title}
      close={close}
      closeLabel="Keep it"
      actions={
        <button
          type="button"
          class="danger"
          onClick={(event) => {
            event.currentTarget.closest("dialog")?.close();
            act();
          }}
        >
          {action}
        </button>
      }
    >
      {children}
    </Dialog>
  );
}
