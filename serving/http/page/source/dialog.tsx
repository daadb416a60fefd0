/** A modal dialog: the browser keeps the focus in it, and Escape closes it. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

interface Props {
  title: string;
  close: () => void;
  closeLabel?: string;
  actions?: ComponentChildren;
  children: ComponentChildren;
}

export function Dialog({ title, close, closeLabel = "Close", actions, children }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} aria-labelledby={id} onClose={close}>
      <h2 id={id}>{title}</h2>
      {children}
      <div class="actions">
        {actions}
        <button type="button" onClick={() => dialog.current?.close()}>
          {closeLabel}
        </button>
      </div>
    </dialog>
  );
}
