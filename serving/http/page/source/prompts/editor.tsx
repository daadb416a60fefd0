/** The editor of a prompt's template: a text, or the messages of a chat. */

import { draft } from "./template";

const ROLES = ["system", "user", "assistant"];

export function TemplateEditor() {
  const now = draft.value;
  const { template } = now;
  const isChat = typeof template !== "string";
  const set = (next: typeof template) => (draft.value = { ...now, template: next });
  const messages = isChat ? template : [];
  const changeKind = (chat: boolean) => {
    if (chat !== isChat) set(chat ? [{ role: "user", content: template as string }] : messages.map((one) => one.content).join("\n\n"));
  };
  return (
    <>
      <fieldset class="tasks">
        <legend class="visually-hidden">Kind of prompt</legend>
        {[false, true].map((chat) => (
          <label key={String(chat)} class="check">
            <input type="radio" name="prompt-kind" checked={chat === isChat} onChange={() => changeKind(chat)} />
            {chat ? "Chat prompt" : "Text prompt"}
          </label>
        ))}
      </fieldset>
      {!isChat && (
        <>
          <label for="template">Template, with {"{{variables}}"}</label>
          <textarea
            id="template"
            rows={3}
            dir="auto"
            value={template}
            onInput={(event) => set(event.currentTarget.value)}
          />
        </>
      )}
      {messages.map((message, index) => {
        const change = (changed: Partial<typeof message>) =>
          set(messages.map((one, place) => (place === index ? { ...one, ...changed } : one)));
        return (
          <div key={index} class="message">
            <select
              aria-label={`Role of message ${index + 1} of the prompt`}
              value={message.role}
              onChange={(event) => change({ role: event.currentTarget.value })}
            >
              {ROLES.map((role) => (
                <option key={role}>{role}</option>
              ))}
            </select>
            <textarea
              aria-label={`Text of message ${index + 1} of the prompt`}
              rows={2}
              dir="auto"
              required
              value={message.content}
              onInput={(event) => change({ content: event.currentTarget.value })}
            />
            <button
              type="button"
              aria-label={`Remove message ${index + 1} of the prompt`}
              onClick={() => set(messages.filter((_, place) => place !== index))}
            >
              Remove
            </button>
          </div>
        );
      })}
      {isChat && (
        <button type="button" onClick={() => set([...messages, { role: "user", content: "" }])}>
          Add a message
        </button>
      )}
    </>
  );
}
