// Owns: dragging a model's row over the bars: pointer events of mouse, pen and finger, and the chip that follows.

import { element } from "./element.js";

const FAR_PX = 6; // less is a click

export class Drag {
  /** bars: the element to drop on. fit: what is told of it. */
  constructor(bars, fit) {
    this.bars = bars;
    this.fit = fit;
    this.chip = null;
    this.model = null;
  }

  /** Make what this element shows draggable by it; `of()` gives the model's id. */
  attach(handle, of) {
    handle.addEventListener("pointerdown", (event) => {
      if (event.button || event.target.closest("button:not(.grip), input, a, code")) return;
      this.begin(event, handle, of());
    });
  }

  begin(event, handle, model) {
    const start = [event.clientX, event.clientY];
    const move = (at) => {
      if (!this.chip && Math.hypot(at.clientX - start[0], at.clientY - start[1]) < FAR_PX) return;
      if (!this.chip) this.lift(handle, at.pointerId, model);
      this.follow(at);
    };
    const end = (at) => {
      handle.removeEventListener("pointermove", move);
      for (const name of ["pointerup", "pointercancel"]) handle.removeEventListener(name, end);
      if (this.chip) this.drop(at.type === "pointerup" && this.isOver(at));
    };
    handle.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) handle.addEventListener(name, end);
    this.cancel = () => end({ type: "pointercancel" });
  }

  lift(handle, pointerId, model) {
    handle.setPointerCapture(pointerId);
    getSelection().removeAllRanges();
    this.fit.close();
    this.model = model;
    this.chip = element("div", { className: "chip", "aria-hidden": "true" }, model);
    document.body.append(this.chip);
    document.body.classList.add("dragging");
    this.fit.begin(model);
    this.escape = (event) => event.key === "Escape" && this.cancel();
    document.addEventListener("keydown", this.escape);
  }

  follow(at) {
    this.chip.style.transform = `translate(${at.clientX + 12}px, ${at.clientY + 12}px)`;
    const isOver = this.isOver(at);
    if (isOver !== this.wasOver) {
      this.wasOver = isOver;
      this.bars.classList.toggle("over", isOver);
      this.fit.show(isOver);
    }
  }

  drop(isDropped) {
    document.removeEventListener("keydown", this.escape);
    this.chip.remove();
    this.chip = null;
    this.wasOver = false;
    document.body.classList.remove("dragging");
    this.bars.classList.remove("over");
    if (isDropped) this.fit.open(this.model);
    else this.fit.close();
  }

  isOver({ clientX, clientY }) {
    const box = this.bars.getBoundingClientRect();
    return clientX >= box.left && clientX <= box.right && clientY >= box.top && clientY <= box.bottom;
  }
}
